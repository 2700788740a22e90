//! Layers of ResNet-18 for a stem and a width: the extents of every feature map, the windows that
//! convolutions read, and the position of each parameter.
//!
//! The network has no BatchNorm layers, because BatchNorm is folded into weights and biases.

use std::ops::Range;

/// Number of classes (logits) of the classifier.
pub const CLASSIFIER_CLASS_COUNT: usize = 10;
/// Number of color channels of an input image.
pub const COLOR_CHANNELS: usize = 3;

/// First layers of a ResNet-18: convolution and optional max pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResNetStem {
    /// The stem is a 7×7 convolution with stride 2, then 3×3 max pooling with stride 2.
    ImageNetStem,
    /// The stem is a 3×3 convolution without pooling.
    CifarStem,
}

/// Sizes that define a ResNet-18 network: stem, width, blocks and image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResNetSizes {
    /// Kind of the network's first layers.
    pub stem: ResNetStem,
    /// Number of channels of the first stage; each later stage has twice the channels of the stage
    /// before.
    pub first_stage_channels: usize,
    /// Number of residual blocks in each stage: 2 in ResNet-18.
    pub blocks_per_stage: usize,
    /// Number of rows, and of columns, of an input image: 32.
    pub image_side_pixels: usize,
}

/// Extents of one frame of activations (one image at one time step), `[side, side, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureMapExtents {
    /// Number of rows of a frame, equal to its number of columns.
    pub side_pixels: usize,
    /// Number of channels of a frame; the channels are the innermost dimension.
    pub channels: usize,
}

impl FeatureMapExtents {
    /// Number of pixels of a frame, rows times columns.
    pub const fn pixels_per_frame(self) -> usize {
        self.side_pixels * self.side_pixels
    }

    /// Number of elements of a frame, pixels times channels.
    pub const fn elements_per_frame(self) -> usize {
        self.pixels_per_frame() * self.channels
    }
}

/// Geometry of a convolution or pooling: which input pixel each output pixel reads with each tap of
/// the window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlidingWindow {
    /// Extents of a frame that the convolution or pooling reads.
    pub input_extents: FeatureMapExtents,
    /// Extents of a frame that the convolution or pooling writes.
    pub output_extents: FeatureMapExtents,
    /// Number of rows, and of columns, of the window; its taps (positions) are numbered row by row.
    pub window_side: usize,
    /// Stride of the window: number of input pixels between the windows of neighbouring output
    /// pixels.
    pub stride_pixels: usize,
}

impl SlidingWindow {
    /// Creates a square window that padding centres on each `stride`-th input pixel.
    pub const fn centred_window(
        input: FeatureMapExtents,
        kernel: usize,
        stride: usize,
        channels: usize,
    ) -> Self {
        let output =
            FeatureMapExtents { side_pixels: input.side_pixels.div_ceil(stride), channels };
        Self {
            input_extents: input,
            output_extents: output,
            window_side: kernel,
            stride_pixels: stride,
        }
    }

    /// Number of rows of padding above the first input row, and of columns left of the first
    /// column.
    pub const fn padding_before_first_row(&self) -> usize {
        self.window_side / 2
    }

    /// Number of taps (positions) of the square window.
    pub const fn tap_count(&self) -> usize {
        self.window_side * self.window_side
    }

    /// Index of the input pixel that output pixel `pixel` reads with tap `tap`; `None` if the tap
    /// reads padding.
    pub fn input_pixel_read_by_tap(&self, pixel: usize, tap: usize) -> Option<usize> {
        let along = |out: usize, tap: usize| {
            let at =
                (out * self.stride_pixels + tap).checked_sub(self.padding_before_first_row())?;
            (at < self.input_extents.side_pixels).then_some(at)
        };
        let row = along(pixel / self.output_extents.side_pixels, tap / self.window_side)?;
        let column = along(pixel % self.output_extents.side_pixels, tap % self.window_side)?;
        Some(row * self.input_extents.side_pixels + column)
    }

    /// Range from the first to the last tap that reads a pixel for any output pixel: one of nine
    /// taps if a frame is one pixel.
    pub fn range_of_taps_that_read_pixels(&self) -> Range<usize> {
        let reads = |tap: &usize| {
            (0..self.output_extents.pixels_per_frame())
                .any(|pixel| self.input_pixel_read_by_tap(pixel, *tap).is_some())
        };
        let first = (0..self.tap_count()).find(reads).unwrap_or(0);
        let last = (0..self.tap_count()).rev().find(reads).unwrap_or(0);
        first..last + 1
    }

    /// Number of taps that read a pixel for any output pixel; a tap inside
    /// [`Self::range_of_taps_that_read_pixels`] may read only padding.
    pub fn count_of_taps_that_read_pixels(&self) -> usize {
        let reads = |tap: &usize| {
            (0..self.output_extents.pixels_per_frame())
                .any(|pixel| self.input_pixel_read_by_tap(pixel, *tap).is_some())
        };
        (0..self.tap_count()).filter(reads).count()
    }

    /// Number of pairs of an output pixel and a tap that read an input pixel, not padding.
    pub fn pixel_reads_per_frame(&self) -> usize {
        let all = |tap| {
            (0..self.output_extents.pixels_per_frame())
                .filter(move |&p| self.input_pixel_read_by_tap(p, tap).is_some())
        };
        (0..self.tap_count()).map(|tap| all(tap).count()).sum()
    }
}

/// A convolution layer: its geometry, and the position of its weight `[out, kernel, kernel, in]`
/// among the parameters; the bias `[out]` follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvolutionLayer {
    /// Name of the convolution layer as in torchvision, such as `layer1.0.conv1`.
    pub layer_name: String,
    /// Geometry of the convolution: its input and output extents, window size and stride.
    pub window: SlidingWindow,
    /// Index of the first element of the convolution's weight among all parameters.
    pub first_weight_index: usize,
}

impl ConvolutionLayer {
    /// Number of weights of one filter: taps times input channels.
    pub const fn elements_per_filter(&self) -> usize {
        self.window.tap_count() * self.window.input_extents.channels
    }

    /// Number of elements of the convolution's whole weight.
    pub const fn elements_of_weight(&self) -> usize {
        self.elements_per_filter() * self.window.output_extents.channels
    }

    /// Index of the bias's first element among all parameters.
    pub const fn index_of_first_bias(&self) -> usize {
        self.first_weight_index + self.elements_of_weight()
    }

    /// Number of multiply-adds of the convolution over one frame, without multiplications by
    /// padding.
    pub fn multiply_adds_per_frame(&self) -> u64 {
        (self.window.pixel_reads_per_frame()
            * self.window.input_extents.channels
            * self.window.output_extents.channels) as u64
    }
}

/// Residual block of ResNet-18, which computes `neurons(second(neurons(first(x))) + shortcut(x))`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNetBlock {
    /// First convolution of the block, 3×3; its stride is 2 in the first block of every stage
    /// except the first stage.
    pub first: ConvolutionLayer,
    /// Second convolution of the block, 3×3.
    pub second: ConvolutionLayer,
    /// Convolution of the block's shortcut, 1×1, if input and output extents differ; otherwise the
    /// shortcut is the identity.
    pub shortcut: Option<ConvolutionLayer>,
}

impl ResNetBlock {
    /// Convolutions of this block, in the order of their parameters.
    pub fn convolutions_of_block(&self) -> impl Iterator<Item = &ConvolutionLayer> {
        [Some(&self.first), Some(&self.second), self.shortcut.as_ref()].into_iter().flatten()
    }
}

/// All layers of a ResNet-18 network, with the positions of their parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNet18Layers {
    /// First convolution layer, which reads the image.
    pub stem: ConvolutionLayer,
    /// Geometry of the max pooling after the stem's neurons, if the stem has pooling.
    pub pool: Option<SlidingWindow>,
    /// All residual blocks.
    pub blocks: Vec<ResNetBlock>,
    /// Index of the first element of the classifier's weight `[10, features]` among all parameters;
    /// the bias `[10]` follows.
    pub first_classifier_weight_index: usize,
    /// Number of elements of all parameters together, padded with zeros to a multiple of the number
    /// of first-stage channels.
    pub padded_parameter_count: usize,
}

impl ResNetSizes {
    /// Extents of an input image.
    pub const fn image_extents(&self) -> FeatureMapExtents {
        FeatureMapExtents { side_pixels: self.image_side_pixels, channels: COLOR_CHANNELS }
    }

    /// Builds the layers of the ResNet-18 network of these sizes.
    pub fn build_resnet18_layers(&self) -> ResNet18Layers {
        let mut used = 0;
        let mut conv = |name: String, input, kernel, stride, channels| {
            let window = SlidingWindow::centred_window(input, kernel, stride, channels);
            let conv = ConvolutionLayer { layer_name: name, window, first_weight_index: used };
            used = conv.index_of_first_bias() + channels;
            conv
        };
        let image = self.image_extents();
        let (stem, pool) = match self.stem {
            ResNetStem::ImageNetStem => {
                let stem = conv("conv1".to_owned(), image, 7, 2, self.first_stage_channels);
                let pool = SlidingWindow::centred_window(
                    stem.window.output_extents,
                    3,
                    2,
                    self.first_stage_channels,
                );
                (stem, Some(pool))
            }
            ResNetStem::CifarStem => {
                (conv("conv1".to_owned(), image, 3, 1, self.first_stage_channels), None)
            }
        };
        let mut map = pool.as_ref().unwrap_or(&stem.window).output_extents;
        let mut blocks = Vec::new();
        for stage in 0..4 {
            for block in 0..self.blocks_per_stage {
                let name = |layer: &str| format!("layer{}.{block}.{layer}", stage + 1);
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let channels = self.first_stage_channels << stage;
                let first = conv(name("conv1"), map, 3, stride, channels);
                let output = first.window.output_extents;
                let second = conv(name("conv2"), output, 3, 1, channels);
                let shortcut =
                    (output != map).then(|| conv(name("downsample"), map, 1, stride, channels));
                blocks.push(ResNetBlock { first, second, shortcut });
                map = output;
            }
        }
        let classifier = used;
        let parameters = (classifier + CLASSIFIER_CLASS_COUNT * (map.channels + 1))
            .next_multiple_of(self.first_stage_channels);
        ResNet18Layers {
            stem,
            pool,
            blocks,
            first_classifier_weight_index: classifier,
            padded_parameter_count: parameters,
        }
    }
}

impl ResNet18Layers {
    /// Convolutions of the whole network, the stem's first, in the order of their parameters.
    pub fn all_convolutions(&self) -> impl Iterator<Item = &ConvolutionLayer> {
        std::iter::once(&self.stem)
            .chain(self.blocks.iter().flat_map(ResNetBlock::convolutions_of_block))
    }

    /// Extents of a frame of the last layer, whose pixels the classifier averages.
    pub fn last_feature_map(&self) -> FeatureMapExtents {
        self.blocks
            .last()
            .map_or(self.stem.window.output_extents, |block| block.second.window.output_extents)
    }

    /// Extents of a frame of each neuron layer, in order: the stem's, then two for each residual
    /// block.
    pub fn extents_of_neuron_layers(&self) -> Vec<FeatureMapExtents> {
        let of_block = |block: &ResNetBlock| {
            [block.first.window.output_extents, block.second.window.output_extents]
        };
        let blocks = self.blocks.iter().flat_map(of_block);
        std::iter::once(self.stem.window.output_extents).chain(blocks).collect()
    }

    /// Number of neurons of the network for one image.
    pub fn neurons_per_image(&self) -> usize {
        self.extents_of_neuron_layers().iter().map(|map| map.elements_per_frame()).sum()
    }

    /// Name, index of the first element, and number of elements of each parameter tensor.
    pub fn names_and_ranges_of_parameters(&self) -> Vec<(String, usize, usize)> {
        let features = self.last_feature_map().channels;
        let mut all = Vec::new();
        for conv in self.all_convolutions() {
            all.push((
                format!("{}.weight", conv.layer_name),
                conv.first_weight_index,
                conv.elements_of_weight(),
            ));
            let channels = conv.window.output_extents.channels;
            all.push((format!("{}.bias", conv.layer_name), conv.index_of_first_bias(), channels));
        }
        let bias = self.first_classifier_weight_index + CLASSIFIER_CLASS_COUNT * features;
        all.push((
            "fc.weight".to_owned(),
            self.first_classifier_weight_index,
            CLASSIFIER_CLASS_COUNT * features,
        ));
        all.push(("fc.bias".to_owned(), bias, CLASSIFIER_CLASS_COUNT));
        all
    }
}

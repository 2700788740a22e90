//! ResNet-18's layers for a stem and a width: the extents of every map, the windows that
//! convolutions read, and the position of each parameter.
//!
//! BatchNorm is excluded on purpose: it is folded into weights and biases.

use std::ops::Range;

/// Number of classes of the classifier.
pub const CLASS_COUNT: usize = 10;
/// Number of color channels of an image.
pub const COLOR_CHANNELS: usize = 3;

/// First layers of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkStem {
    /// A 7×7 convolution with stride 2, then 3×3 max pooling with stride 2.
    ImageNet,
    /// A 3×3 convolution without pooling.
    Cifar,
}

/// Sizes that define a ResNet-18 network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NetworkSizes {
    /// First layers of the network.
    pub stem: NetworkStem,
    /// Channels of the first stage; each later stage has twice the channels of the one before.
    pub width: usize,
    /// Number of residual blocks in a stage: 2 in ResNet-18.
    pub blocks: usize,
    /// Number of rows and of columns of an image: 32.
    pub side: usize,
}

/// Extents of one frame of activations, `[side, side, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureMap {
    /// Number of rows of a frame, which equals its number of columns.
    pub side: usize,
    /// Number of channels, which are the innermost axis.
    pub channels: usize,
}

impl FeatureMap {
    /// Number of pixels of a frame.
    pub const fn pixel_count(self) -> usize {
        self.side * self.side
    }

    /// Number of elements of a frame.
    pub const fn elements(self) -> usize {
        self.pixel_count() * self.channels
    }
}

/// Source pixels of each output pixel of a convolution or pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvolutionWindow {
    /// Extents of the frame that the convolution or pooling reads.
    pub input: FeatureMap,
    /// Extents of the frame that the convolution or pooling writes.
    pub output: FeatureMap,
    /// Rows and columns of the window; taps are numbered row by row.
    pub kernel: usize,
    /// Stride: number of input pixels between neighbouring output pixels.
    pub stride: usize,
}

impl ConvolutionWindow {
    /// Creates a window that is centred on each `stride`-th pixel by padding.
    pub const fn new(input: FeatureMap, kernel: usize, stride: usize, channels: usize) -> Self {
        let output = FeatureMap { side: input.side.div_ceil(stride), channels };
        Self { input, output, kernel, stride }
    }

    /// Number of rows of padding before the first row.
    pub const fn padding_rows(&self) -> usize {
        self.kernel / 2
    }

    /// Number of taps (positions) of the convolution window.
    pub const fn window_taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// Index of the input pixel that an output pixel reads with a tap; `None` in the padding.
    pub fn source_pixel(&self, pixel: usize, tap: usize) -> Option<usize> {
        let along = |out: usize, tap: usize| {
            let at = (out * self.stride + tap).checked_sub(self.padding_rows())?;
            (at < self.input.side).then_some(at)
        };
        let row = along(pixel / self.output.side, tap / self.kernel)?;
        let column = along(pixel % self.output.side, tap % self.kernel)?;
        Some(row * self.input.side + column)
    }

    /// Range of taps from the first to the last that read a pixel anywhere: one of nine taps if a
    /// frame is one pixel.
    pub fn taps_that_read_pixels(&self) -> Range<usize> {
        let reads = |tap: &usize| {
            (0..self.output.pixel_count()).any(|pixel| self.source_pixel(pixel, *tap).is_some())
        };
        let first = (0..self.window_taps()).find(reads).unwrap_or(0);
        let last = (0..self.window_taps()).rev().find(reads).unwrap_or(0);
        first..last + 1
    }

    /// Number of taps that read a pixel somewhere: the taps of [`Self::taps_that_read_pixels`],
    /// except for some in between.
    pub fn count_of_reading_taps(&self) -> usize {
        let reads = |tap: &usize| {
            (0..self.output.pixel_count()).any(|pixel| self.source_pixel(pixel, *tap).is_some())
        };
        (0..self.window_taps()).filter(reads).count()
    }

    /// Number of pairs of output pixel and tap that read a pixel.
    pub fn pixel_tap_reads(&self) -> usize {
        let all = |tap| {
            (0..self.output.pixel_count()).filter(move |&p| self.source_pixel(p, tap).is_some())
        };
        (0..self.window_taps()).map(|tap| all(tap).count()).sum()
    }
}

/// A convolution layer: its weight `[out, kernel, kernel, in]` is followed by its bias `[out]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvolutionLayer {
    /// Name as in torchvision: `layer1.0.conv1`.
    pub name: String,
    /// Source pixels of each output pixel.
    pub window: ConvolutionWindow,
    /// Index of the weight's first element among the parameters.
    pub weight: usize,
}

impl ConvolutionLayer {
    /// Number of elements of one convolution filter.
    pub const fn filter_elements(&self) -> usize {
        self.window.window_taps() * self.window.input.channels
    }

    /// Number of elements of the weight.
    pub const fn weight_elements(&self) -> usize {
        self.filter_elements() * self.window.output.channels
    }

    /// Index of the bias's first element among the parameters.
    pub const fn first_bias_element(&self) -> usize {
        self.weight + self.weight_elements()
    }

    /// Number of multiply-adds of one frame, without those with padding.
    pub fn multiply_adds(&self) -> u64 {
        (self.window.pixel_tap_reads() * self.window.input.channels * self.window.output.channels)
            as u64
    }
}

/// Residual block that computes `neurons(second(neurons(first(x))) + shortcut(x))`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResidualBlock {
    /// The block's first convolution, 3×3; its stride is 2 in the first block of every stage except
    /// the first stage.
    pub first: ConvolutionLayer,
    /// The block's second convolution, 3×3.
    pub second: ConvolutionLayer,
    /// The shortcut's convolution, 1×1, if the extents change; otherwise the shortcut is the
    /// identity.
    pub shortcut: Option<ConvolutionLayer>,
}

impl ResidualBlock {
    /// Convolutions of the block, in the order of their parameters.
    pub fn block_convolutions(&self) -> impl Iterator<Item = &ConvolutionLayer> {
        [Some(&self.first), Some(&self.second), self.shortcut.as_ref()].into_iter().flatten()
    }
}

/// Layers of a whole ResNet-18 network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNet18 {
    /// Convolution of the image.
    pub stem: ConvolutionLayer,
    /// Max-pooling after the stem's neurons, if the network has it.
    pub pool: Option<ConvolutionWindow>,
    /// All residual blocks.
    pub blocks: Vec<ResidualBlock>,
    /// Index of the first element of the classifier's weight `[10, features]`; its bias `[10]`
    /// follows.
    pub classifier: usize,
    /// Number of elements of all parameters, a multiple of the width: zeros follow the last bias.
    pub parameters: usize,
}

impl NetworkSizes {
    /// Extents of an input image.
    pub const fn image(&self) -> FeatureMap {
        FeatureMap { side: self.side, channels: COLOR_CHANNELS }
    }

    /// Builds the layers of the ResNet-18 network.
    pub fn build_network(&self) -> ResNet18 {
        let mut used = 0;
        let mut conv = |name: String, input, kernel, stride, channels| {
            let window = ConvolutionWindow::new(input, kernel, stride, channels);
            let conv = ConvolutionLayer { name, window, weight: used };
            used = conv.first_bias_element() + channels;
            conv
        };
        let image = self.image();
        let (stem, pool) = match self.stem {
            NetworkStem::ImageNet => {
                let stem = conv("conv1".to_owned(), image, 7, 2, self.width);
                let pool = ConvolutionWindow::new(stem.window.output, 3, 2, self.width);
                (stem, Some(pool))
            }
            NetworkStem::Cifar => (conv("conv1".to_owned(), image, 3, 1, self.width), None),
        };
        let mut map = pool.as_ref().unwrap_or(&stem.window).output;
        let mut blocks = Vec::new();
        for stage in 0..4 {
            for block in 0..self.blocks {
                let name = |layer: &str| format!("layer{}.{block}.{layer}", stage + 1);
                let stride = if stage > 0 && block == 0 { 2 } else { 1 };
                let channels = self.width << stage;
                let first = conv(name("conv1"), map, 3, stride, channels);
                let output = first.window.output;
                let second = conv(name("conv2"), output, 3, 1, channels);
                let shortcut =
                    (output != map).then(|| conv(name("downsample"), map, 1, stride, channels));
                blocks.push(ResidualBlock { first, second, shortcut });
                map = output;
            }
        }
        let classifier = used;
        let parameters =
            (classifier + CLASS_COUNT * (map.channels + 1)).next_multiple_of(self.width);
        ResNet18 { stem, pool, blocks, classifier, parameters }
    }
}

impl ResNet18 {
    /// Convolutions of the network, in the order of their parameters.
    pub fn block_convolutions(&self) -> impl Iterator<Item = &ConvolutionLayer> {
        std::iter::once(&self.stem)
            .chain(self.blocks.iter().flat_map(ResidualBlock::block_convolutions))
    }

    /// Extents of the last layer's frame, whose pixels the classifier averages.
    pub fn last_map(&self) -> FeatureMap {
        self.blocks.last().map_or(self.stem.window.output, |block| block.second.window.output)
    }

    /// Extents of each layer of neurons, in order: the stem's, then two for each block.
    pub fn neuron_layer_extents(&self) -> Vec<FeatureMap> {
        let of_block =
            |block: &ResidualBlock| [block.first.window.output, block.second.window.output];
        let blocks = self.blocks.iter().flat_map(of_block);
        std::iter::once(self.stem.window.output).chain(blocks).collect()
    }

    /// Number of neurons for one image.
    pub fn neuron_count(&self) -> usize {
        self.neuron_layer_extents().iter().map(|map| map.elements()).sum()
    }

    /// Layout of the parameters: name, index of the first element, and number of elements of each
    /// parameter.
    pub fn parameter_layout(&self) -> Vec<(String, usize, usize)> {
        let features = self.last_map().channels;
        let mut all = Vec::new();
        for conv in self.block_convolutions() {
            all.push((format!("{}.weight", conv.name), conv.weight, conv.weight_elements()));
            let channels = conv.window.output.channels;
            all.push((format!("{}.bias", conv.name), conv.first_bias_element(), channels));
        }
        let bias = self.classifier + CLASS_COUNT * features;
        all.push(("fc.weight".to_owned(), self.classifier, CLASS_COUNT * features));
        all.push(("fc.bias".to_owned(), bias, CLASS_COUNT));
        all
    }
}

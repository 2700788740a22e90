//! ResNet-18's layers for a stem and a width: the extents of every map, the windows that
//! convolutions read, and where each parameter lies.
//!
//! Deliberately absent: BatchNorm, which is folded into weights and biases.

use std::ops::Range;

/// Classes of the classifier.
pub const CLASSES: usize = 10;
/// Channels of an image.
pub const COLORS: usize = 3;

/// How the network begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stem {
    /// 7×7 with stride 2, then 3×3 max-pooling with stride 2.
    ImageNet,
    /// 3×3, no pooling.
    Cifar,
}

/// Sizes that define a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// How the network begins.
    pub stem: Stem,
    /// Channels of the first stage; each later stage has twice the channels of the one before.
    pub width: usize,
    /// Residual blocks of a stage: 2 in ResNet-18.
    pub blocks: usize,
    /// Rows and columns of an image: 32.
    pub side: usize,
}

/// Extents of one frame, `[side, side, channels]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Map {
    /// Rows, and columns.
    pub side: usize,
    /// Channels, the innermost axis.
    pub channels: usize,
}

impl Map {
    /// Positions.
    pub const fn pixels(self) -> usize {
        self.side * self.side
    }

    /// Elements.
    pub const fn elements(self) -> usize {
        self.pixels() * self.channels
    }
}

/// Source pixels of each output pixel of a convolution or pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Frame read.
    pub input: Map,
    /// Frame written.
    pub output: Map,
    /// Rows and columns of the window; taps are numbered row by row.
    pub kernel: usize,
    /// Input pixels between neighbouring output pixels.
    pub stride: usize,
}

impl Window {
    /// A window around each `stride`-th pixel: padded so that it is centred.
    pub const fn new(input: Map, kernel: usize, stride: usize, channels: usize) -> Self {
        let output = Map { side: input.side.div_ceil(stride), channels };
        Self { input, output, kernel, stride }
    }

    /// Rows of padding before the first.
    pub const fn padding(&self) -> usize {
        self.kernel / 2
    }

    /// Positions of the window.
    pub const fn taps(&self) -> usize {
        self.kernel * self.kernel
    }

    /// The input pixel that an output pixel reads with a tap, `None` in the padding.
    pub fn source(&self, pixel: usize, tap: usize) -> Option<usize> {
        let along = |out: usize, tap: usize| {
            let at = (out * self.stride + tap).checked_sub(self.padding())?;
            (at < self.input.side).then_some(at)
        };
        let row = along(pixel / self.output.side, tap / self.kernel)?;
        let column = along(pixel % self.output.side, tap % self.kernel)?;
        Some(row * self.input.side + column)
    }

    /// The taps from the first to the last that read a pixel anywhere: one of nine if a frame is
    /// one pixel.
    pub fn live_taps(&self) -> Range<usize> {
        let reads =
            |tap: &usize| (0..self.output.pixels()).any(|pixel| self.source(pixel, *tap).is_some());
        let first = (0..self.taps()).find(reads).unwrap_or(0);
        let last = (0..self.taps()).rev().find(reads).unwrap_or(0);
        first..last + 1
    }

    /// Taps that read a pixel somewhere: those of [`Self::live_taps`] but for some in between.
    pub fn reading_taps(&self) -> usize {
        let reads =
            |tap: &usize| (0..self.output.pixels()).any(|pixel| self.source(pixel, *tap).is_some());
        (0..self.taps()).filter(reads).count()
    }

    /// Pairs of output pixel and tap that read a pixel.
    pub fn reads(&self) -> usize {
        let all = |tap| (0..self.output.pixels()).filter(move |&p| self.source(p, tap).is_some());
        (0..self.taps()).map(|tap| all(tap).count()).sum()
    }
}

/// A convolution: weight `[out, kernel, kernel, in]`, then bias `[out]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conv {
    /// Name as in torchvision: `layer1.0.conv1`.
    pub name: String,
    /// Source pixels.
    pub window: Window,
    /// First element of the convolution's weight among the parameters.
    pub weight: usize,
}

impl Conv {
    /// Elements of a filter.
    pub const fn depth(&self) -> usize {
        self.window.taps() * self.window.input.channels
    }

    /// Elements of the weight.
    pub const fn weights(&self) -> usize {
        self.depth() * self.window.output.channels
    }

    /// First element of the bias among the parameters.
    pub const fn bias(&self) -> usize {
        self.weight + self.weights()
    }

    /// Multiply-adds of a frame, without those with the padding.
    pub fn multiply_adds(&self) -> u64 {
        (self.window.reads() * self.window.input.channels * self.window.output.channels) as u64
    }
}

/// `neurons(second(neurons(first(x))) + shortcut(x))`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// 3×3; the first of a stage but the first one has stride 2.
    pub first: Conv,
    /// 3×3.
    pub second: Conv,
    /// 1×1 if the extents change, else the identity.
    pub shortcut: Option<Conv>,
}

impl Block {
    /// Convolutions of the block, in the order of their parameters.
    pub fn convolutions(&self) -> impl Iterator<Item = &Conv> {
        [Some(&self.first), Some(&self.second), self.shortcut.as_ref()].into_iter().flatten()
    }
}

/// A whole network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Convolution of the image.
    pub stem: Conv,
    /// Max-pooling behind the stem's neurons.
    pub pool: Option<Window>,
    /// All residual blocks.
    pub blocks: Vec<Block>,
    /// First element of the classifier's weight `[10, features]`; its bias `[10]` follows.
    pub classifier: usize,
    /// Elements of all parameters, a multiple of the width: behind the last bias lie zeros.
    pub parameters: usize,
}

impl Sizes {
    /// Extents of an image.
    pub const fn image(&self) -> Map {
        Map { side: self.side, channels: COLORS }
    }

    /// The layers.
    pub fn network(&self) -> Network {
        let mut used = 0;
        let mut conv = |name: String, input, kernel, stride, channels| {
            let window = Window::new(input, kernel, stride, channels);
            let conv = Conv { name, window, weight: used };
            used = conv.bias() + channels;
            conv
        };
        let image = self.image();
        let (stem, pool) = match self.stem {
            Stem::ImageNet => {
                let stem = conv("conv1".to_owned(), image, 7, 2, self.width);
                let pool = Window::new(stem.window.output, 3, 2, self.width);
                (stem, Some(pool))
            }
            Stem::Cifar => (conv("conv1".to_owned(), image, 3, 1, self.width), None),
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
                blocks.push(Block { first, second, shortcut });
                map = output;
            }
        }
        let classifier = used;
        let parameters = (classifier + CLASSES * (map.channels + 1)).next_multiple_of(self.width);
        Network { stem, pool, blocks, classifier, parameters }
    }
}

impl Network {
    /// The convolutions, in the order of their parameters.
    pub fn convolutions(&self) -> impl Iterator<Item = &Conv> {
        std::iter::once(&self.stem).chain(self.blocks.iter().flat_map(Block::convolutions))
    }

    /// Frame of the last neurons, which the classifier averages over its pixels.
    pub fn last(&self) -> Map {
        self.blocks.last().map_or(self.stem.window.output, |block| block.second.window.output)
    }

    /// Frame of each layer of neurons, in order: the stem's, then two a block.
    pub fn neurons(&self) -> Vec<Map> {
        let of_block = |block: &Block| [block.first.window.output, block.second.window.output];
        let blocks = self.blocks.iter().flat_map(of_block);
        std::iter::once(self.stem.window.output).chain(blocks).collect()
    }

    /// Neurons of an image.
    pub fn neuron_count(&self) -> usize {
        self.neurons().iter().map(|map| map.elements()).sum()
    }

    /// Each parameter: its name, first element and elements.
    pub fn layout(&self) -> Vec<(String, usize, usize)> {
        let features = self.last().channels;
        let mut all = Vec::new();
        for conv in self.convolutions() {
            all.push((format!("{}.weight", conv.name), conv.weight, conv.weights()));
            let channels = conv.window.output.channels;
            all.push((format!("{}.bias", conv.name), conv.bias(), channels));
        }
        let bias = self.classifier + CLASSES * features;
        all.push(("fc.weight".to_owned(), self.classifier, CLASSES * features));
        all.push(("fc.bias".to_owned(), bias, CLASSES));
        all
    }
}

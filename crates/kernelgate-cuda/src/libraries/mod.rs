//! NVIDIA's libraries that compute: GEMMs by cuBLASLt, operation graphs by cuDNN.

pub mod cublaslt;
pub mod cudnn;
pub mod gemm;
mod lt;

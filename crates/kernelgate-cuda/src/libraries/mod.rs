//! NVIDIA's libraries that compute: Wrappers of CUDA libraries: GEMMs by cuBLASLt, operation graphs
//! by cuDNN, collectives by NCCL.

pub mod cublaslt;
pub mod cudnn;
pub mod gemm;
mod lt;
pub mod nccl;

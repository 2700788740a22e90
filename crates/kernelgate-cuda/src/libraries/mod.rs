//! Wrappers of NVIDIA's libraries that compute GEMMs (cuBLASLt), operation graphs (cuDNN) and
//! collectives (NCCL).

pub mod cublaslt;
pub mod cudnn;
pub mod gemm;
mod lt;
pub mod nccl;

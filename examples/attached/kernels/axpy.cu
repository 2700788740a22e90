// This kernel computes out = a x + y; each thread computes one element.
extern "C" __global__ void axpy(float a, const float* x, const float* y, float* out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}

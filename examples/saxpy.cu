// out[i] = a x[i] + y[i]; a thread an element, bound by memory.
extern "C" __global__ void saxpy(float a, const float* x, const float* y, float* out, long long n) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) out[i] = a * x[i] + y[i];
}

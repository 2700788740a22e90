// A library of its own: C, the driver API, no binding of Rust.
#include <stddef.h>
#include <stdint.h>

typedef struct CUstream_st *CUstream;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
int cuModuleLoadData(CUmodule *module, const void *image);
int cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
int cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   CUstream stream, void **parameters, void **extra);

// The kernel of that PTX, in the context that is current; null where it does not load.
CUfunction axpy_load(const char *ptx) {
    CUmodule module;
    CUfunction function;
    if (cuModuleLoadData(&module, ptx) || cuModuleGetFunction(&function, module, "axpy")) return NULL;
    return function;
}

// out = a x + y on that stream; the driver's error, or 0.
int axpy(CUfunction kernel, CUstream stream, float a, uint64_t x, uint64_t y, uint64_t out,
         unsigned n) {
    void *parameters[] = {&a, &x, &y, &out, &n};
    return cuLaunchKernel(kernel, (n + 255) / 256, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}

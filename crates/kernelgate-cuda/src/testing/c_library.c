// A shared library as other people's are: C, the driver API, a kernel of its own, and a stream that
// the caller does not know. It is linked with nothing of CUDA: the driver is loaded already.
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef int Status;
static Status (*module_load)(void **module, const void *image);
static Status (*get_function)(void **function, void *module, const char *name);
static Status (*stream_create)(void **stream, unsigned flags);
static Status (*launch_kernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned shared_bytes, void *stream, void **parameters,
                               void **extra);

enum { NON_BLOCKING = 1 };
static void *kernel, *stream;

// Loads the kernel `triple` of that PTX into the context that is current, and makes a stream of
// its own where that is asked for; else it launches on the default one. The driver's error, or 0;
// -1 without a driver.
int kernelgate_test_open(const char *ptx, int own_stream) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return -1;
    *(void **)&module_load = dlsym(driver, "cuModuleLoadData");
    *(void **)&get_function = dlsym(driver, "cuModuleGetFunction");
    *(void **)&stream_create = dlsym(driver, "cuStreamCreate");
    *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernel");
    if (!module_load || !get_function || !stream_create || !launch_kernel) return -1;
    void *module;
    stream = NULL;
    Status status = module_load(&module, ptx);
    if (!status) status = get_function(&kernel, module, "triple");
    if (!status && own_stream) status = stream_create(&stream, NON_BLOCKING);
    return status;
}

// y = 3 x of n f32 elements; the driver's error, or 0.
int kernelgate_test_triple(uint64_t x, uint64_t y, int64_t n) {
    void *parameters[] = {&x, &y, &n};
    return launch_kernel(kernel, (unsigned)((n + 255) / 256), 1, 1, 256, 1, 1, 0, stream,
                         parameters, NULL);
}

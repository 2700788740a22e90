// An empty kernel: its measured time is the cost of a launch, of a graph node, or of a pair of
// events around a launch.
extern "C" __global__ void measure_empty() {}

// From the first graph of a step to the second, whose size the first one says: three ways, timed. See across.py.
//
//   read        the count goes to pinned memory; the host sees the first graph's event, and launches the graph of that size
//   guess       both graphs are launched at once: the size is known
//   conditional one graph, whose switch node runs the body of that size
//
// Every kernel takes as long. Prints a line of JSON a way.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                                     \
    do {                                                                                                \
        cudaError_t code = (call);                                                                      \
        if (code != cudaSuccess) {                                                                      \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(code));                          \
            std::exit(1);                                                                               \
        }                                                                                               \
    } while (0)

__device__ unsigned long long now() {
    unsigned long long found;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(found));
    return found;
}

// One block a multiprocessor; `ns` of work.
__global__ void work(int ns) {
    unsigned long long end = now() + ns;
    while (now() < end) {
    }
}

// The end of the first graph: when, and which size comes next.
__global__ void decide(unsigned long long* stamp, volatile int* count, int* next, int sizes) {
    *next = (*next + 1) % sizes;
    *count = *next;
    __threadfence_system();
    *stamp = now();
}

__global__ void choose(cudaGraphConditionalHandle handle, const int* next) { cudaGraphSetConditional(handle, *next); }

__global__ void arrive(unsigned long long* stamp) { *stamp = now(); }

struct Chain {
    cudaGraph_t graph;
    cudaGraphNode_t last = nullptr;

    template <typename... Parameters, typename... Arguments>
    void add(void (*kernel)(Parameters...), int blocks, Arguments... arguments) {
        void* pointers[] = {&arguments...};
        cudaKernelNodeParams of = {};
        of.func = reinterpret_cast<void*>(kernel);
        of.gridDim = dim3(blocks);
        of.blockDim = dim3(32);
        of.kernelParams = pointers;
        cudaGraphNode_t node;
        CHECK(cudaGraphAddKernelNode(&node, graph, last ? &last : nullptr, last ? 1 : 0, &of));
        last = node;
    }

    std::vector<cudaGraph_t> add_switch(cudaGraphConditionalHandle handle, int sizes) {
        cudaGraphNodeParams of = {};
        of.type = cudaGraphNodeTypeConditional;
        of.conditional.handle = handle;
        of.conditional.type = cudaGraphCondTypeSwitch;
        of.conditional.size = sizes;
        cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
        CHECK(cudaGraphAddNode(&node, graph, &last, nullptr, 1, &of));
#else
        CHECK(cudaGraphAddNode(&node, graph, &last, 1, &of));
#endif
        last = node;
        return std::vector<cudaGraph_t>(of.conditional.phGraph_out, of.conditional.phGraph_out + sizes);
    }
};

struct Setup {
    int kernels, ns, blocks, sizes;
    unsigned long long* stamps;  // on the device: the end of the first graph, the beginning of the second
    int* count;                  // pinned
    int* next;                   // on the device

    void prefix(Chain& chain) const {
        for (int i = 0; i < kernels / 17; ++i) chain.add(work, blocks, ns);
        chain.add(decide, 1, stamps, static_cast<volatile int*>(count), next, sizes);
    }

    void suffix(Chain& chain) const {
        chain.add(arrive, 1, stamps + 1);
        for (int i = 0; i < kernels; ++i) chain.add(work, blocks, ns);
    }
};

static Chain begun() {
    Chain chain;
    CHECK(cudaGraphCreate(&chain.graph, 0));
    return chain;
}

static double us_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// An executable graph, what making it took, and what of the device's memory.
static cudaGraphExec_t instantiated(cudaGraph_t graph, cudaStream_t stream, double& ms, double& mib) {
    size_t before, after, total;
    CHECK(cudaMemGetInfo(&before, &total));
    auto begin = std::chrono::steady_clock::now();
    cudaGraphExec_t found;
    CHECK(cudaGraphInstantiate(&found, graph, 0));
    CHECK(cudaGraphUpload(found, stream));
    CHECK(cudaStreamSynchronize(stream));
    ms += us_since(begin) / 1e3;
    CHECK(cudaMemGetInfo(&after, &total));
    mib += (static_cast<double>(before) - static_cast<double>(after)) / (1 << 20);
    return found;
}

static double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

template <typename Launch>
static void timed(const char* way, const Setup& setup, cudaStream_t stream, double ms, double mib, Launch launch) {
    std::vector<double> steps, gaps, hosts;
    for (int i = 0; i < 120; ++i) {
        auto begin = std::chrono::steady_clock::now();
        double host = launch();
        CHECK(cudaStreamSynchronize(stream));
        steps.push_back(us_since(begin));
        hosts.push_back(host);
        unsigned long long stamps[2];
        CHECK(cudaMemcpy(stamps, setup.stamps, sizeof(stamps), cudaMemcpyDeviceToHost));
        gaps.push_back(static_cast<double>(stamps[1] - stamps[0]) / 1e3);
    }
    std::printf("{\"way\": \"%s\", \"sizes\": %d, \"kernels\": %d, \"step_us\": %.2f, \"gap_us\": %.2f, \"launch_us\": %.2f, "
                "\"instantiate_ms\": %.2f, \"mib\": %.2f}\n",
                way, setup.sizes, setup.kernels, median(steps), median(gaps), median(hosts), ms, mib);
    std::fflush(stdout);
}

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: across KERNELS NANOSECONDS SIZES\n");
        return 2;
    }
    Setup setup = {std::atoi(argv[1]), std::atoi(argv[2]), 0, std::atoi(argv[3]), nullptr, nullptr, nullptr};
    cudaDeviceProp card;
    CHECK(cudaGetDeviceProperties(&card, 0));
    setup.blocks = card.multiProcessorCount;
    CHECK(cudaMalloc(&setup.stamps, 2 * sizeof(unsigned long long)));
    CHECK(cudaMalloc(&setup.next, sizeof(int)));
    CHECK(cudaMemset(setup.next, 0, sizeof(int)));
    CHECK(cudaHostAlloc(&setup.count, sizeof(int), cudaHostAllocMapped));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

    double ms = 0, mib = 0;
    Chain prefix = begun();
    setup.prefix(prefix);
    cudaGraphExec_t first = instantiated(prefix.graph, stream, ms, mib);
    std::vector<cudaGraphExec_t> seconds;
    for (int size = 0; size < setup.sizes; ++size) {
        Chain suffix = begun();
        setup.suffix(suffix);
        seconds.push_back(instantiated(suffix.graph, stream, ms, mib));
    }
    timed("guess", setup, stream, ms, mib, [&] {
        auto begin = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(first, stream));
        CHECK(cudaGraphLaunch(seconds[0], stream));
        return us_since(begin);
    });
    timed("read", setup, stream, ms, mib, [&] {
        auto begin = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(first, stream));
        CHECK(cudaEventRecord(event, stream));
        double host = us_since(begin);
        while (cudaEventQuery(event) == cudaErrorNotReady) {
        }
        auto again = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(seconds[*static_cast<volatile int*>(setup.count)], stream));
        return host + us_since(again);
    });

    double whole_ms = 0, whole_mib = 0;
    Chain whole = begun();
    setup.prefix(whole);
    cudaGraphConditionalHandle handle;
    CHECK(cudaGraphConditionalHandleCreate(&handle, whole.graph, 0, cudaGraphCondAssignDefault));
    whole.add(choose, 1, handle, static_cast<const int*>(setup.next));
    for (cudaGraph_t body : whole.add_switch(handle, setup.sizes)) {
        Chain suffix;
        suffix.graph = body;
        setup.suffix(suffix);
    }
    cudaGraphExec_t conditional = instantiated(whole.graph, stream, whole_ms, whole_mib);
    timed("conditional", setup, stream, whole_ms, whole_mib, [&] {
        auto begin = std::chrono::steady_clock::now();
        CHECK(cudaGraphLaunch(conditional, stream));
        return us_since(begin);
    });
    return 0;
}

// Notes every kernel, copy and fill of a program: loaded by the CUDA driver through CUDA_INJECTION64_PATH, writes
// $KERNEL_TRACE.RANK when the program ends. phases.py builds it and reads the file.
//
// Lines: "N id name" introduces a (mangled) name, "E id start_ns duration_ns stream" is one event.
#include <cupti.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Event {
  int name;
  std::uint64_t start, end;
  std::uint32_t stream;
};

struct Trace {
  std::mutex mutex;
  std::map<std::string, int> names;
  std::vector<Event> events;

  void add(const char* name, std::uint64_t start, std::uint64_t end, std::uint32_t stream) {
    const auto id = names.emplace(name, static_cast<int>(names.size())).first->second;
    events.push_back({id, start, end, stream});
  }
};

// Outlives every destructor: CUPTI may complete buffers while the program ends.
Trace& trace() {
  static auto* const instance = new Trace;
  return *instance;
}

void CUPTIAPI request_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
  *size = std::size_t{8} << 20;
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, *size));
  *max_records = 0;
}

void take(const CUpti_Activity* record) {
  switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
      const auto* k = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
      return trace().add(k->name, k->start, k->end, k->streamId);
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
      const auto* m = reinterpret_cast<const CUpti_ActivityMemcpy6*>(record);
      return trace().add("[copy]", m->start, m->end, m->streamId);
    }
    case CUPTI_ACTIVITY_KIND_MEMCPY2: {
      const auto* m = reinterpret_cast<const CUpti_ActivityMemcpyPtoP4*>(record);
      return trace().add("[copy between GPUs]", m->start, m->end, m->streamId);
    }
    case CUPTI_ACTIVITY_KIND_MEMSET: {
      const auto* m = reinterpret_cast<const CUpti_ActivityMemset4*>(record);
      return trace().add("[fill]", m->start, m->end, m->streamId);
    }
    default:
      return;
  }
}

void CUPTIAPI complete_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
  const std::lock_guard lock(trace().mutex);
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) take(record);
  std::free(buffer);
}

void finish() {
  cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
  const char* rank = std::getenv("RANK");
  const std::string path = std::string(std::getenv("KERNEL_TRACE")) + "." + (rank != nullptr ? rank : "0");
  const std::lock_guard lock(trace().mutex);
  if (trace().events.empty()) return;  // a launcher that only looked at the GPUs
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return;
  for (const auto& [name, id] : trace().names) std::fprintf(file, "N %d %s\n", id, name.c_str());
  for (const Event& e : trace().events) {
    std::fprintf(file, "E %d %llu %llu %u\n", e.name, static_cast<unsigned long long>(e.start),
                 static_cast<unsigned long long>(e.end - e.start), e.stream);
  }
  std::fclose(file);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
  if (std::getenv("KERNEL_TRACE") == nullptr) return 1;
  cuptiActivityRegisterCallbacks(request_buffer, complete_buffer);
  for (const CUpti_ActivityKind kind : {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                        CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET}) {
    cuptiActivityEnable(kind);
  }
  std::atexit(finish);
  return 1;
}

// Memory that proves what is not touched: pages without access lie on both sides, and may be laid over the inside.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace dflow::testing {

enum class Edge { kFront, kBack };  // the side on which the values touch the forbidden pages

template <class T>
class Guarded {
 public:
  explicit Guarded(int64_t count, Edge edge = Edge::kBack) : count_(count) {
    int64_t const page = sysconf(_SC_PAGESIZE);
    int64_t const inner = (count * int64_t{sizeof(T)} + page - 1) / page * page;
    bytes_ = inner + 2 * page;
    base_ = static_cast<char*>(mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base_ == MAP_FAILED || mprotect(base_ + page, inner, PROT_READ | PROT_WRITE) != 0) {
      throw std::runtime_error("no memory for a guarded buffer");
    }
    int64_t const offset = edge == Edge::kFront ? 0 : inner - count * int64_t{sizeof(T)};
    data_ = reinterpret_cast<T*>(base_ + page + offset);
  }
  ~Guarded() { munmap(base_, bytes_); }
  Guarded(Guarded const&) = delete;
  Guarded& operator=(Guarded const&) = delete;

  T* data() { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + count_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }

  // Forbids every access to values [first, first + count); they must fill whole pages.
  void forbid(int64_t first, int64_t count) {
    if (mprotect(data_ + first, count * sizeof(T), PROT_NONE) != 0) {
      throw std::runtime_error("the forbidden values do not fill whole pages");
    }
  }

 private:
  int64_t count_;
  int64_t bytes_;
  char* base_;
  T* data_;
};

}  // namespace dflow::testing

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda_runtime.h"

namespace cuda_on_cpu {

Device device;

namespace {

constexpr size_t kStackBytes = 128 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  char const* waits_for;  // nullptr when it has returned
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<float> mailbox;
  ucontext_t scheduler;
  void (*body)(void const*);
  void const* argument;
} block;

void enter_fiber() {
  block.body(block.argument);
  block.fibers[threadIdx.x].waits_for = nullptr;
}

void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &block.scheduler;
  makecontext(&fiber.context, enter_fiber, 0);
}

void run_until_it_waits(unsigned thread) {
  threadIdx = dim3(thread);
  swapcontext(&block.scheduler, &block.fibers[thread].context);
}

bool same(char const* a, char const* b) {
  return a == b || (a && b && std::strcmp(a, b) == 0);
}

// One turn of every thread; says where they all stopped.
char const* run_turn() {
  char const* stopped_at = nullptr;
  for (unsigned turn = 0; turn < blockDim.x; ++turn) {
    unsigned const thread = device.backwards ? blockDim.x - 1 - turn : turn;
    run_until_it_waits(thread);
    if (turn == 0) stopped_at = block.fibers[thread].waits_for;
    if (!same(block.fibers[thread].waits_for, stopped_at)) {
      std::fprintf(stderr, "thread %u of block %u,%u left the others at a barrier\n", thread, blockIdx.x, blockIdx.y);
      std::abort();
    }
  }
  return stopped_at;
}

}  // namespace

void run_block(void (*body)(void const*), void const* argument) {
  block.body = body;
  block.argument = argument;
  block.fibers.resize(blockDim.x);
  block.mailbox.resize(blockDim.x);
  for (Fiber& fiber : block.fibers) prepare(fiber);
  while (run_turn() != nullptr) {
  }
}

void wait_for_block(char const* kind) {
  Fiber& fiber = block.fibers[threadIdx.x];
  fiber.waits_for = kind;
  swapcontext(&fiber.context, &block.scheduler);
}

float exchange(float value, unsigned partner) {
  block.mailbox[threadIdx.x] = value;
  wait_for_block("shuffle");
  float const received = block.mailbox[partner];
  wait_for_block("shuffle");  // the mailbox may be written again
  return received;
}

}  // namespace cuda_on_cpu

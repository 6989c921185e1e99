// A test runner in a page: TEST(name) { ... CHECK(condition, "what was seen: ", value); }
#pragma once

#include <cstdio>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace check {

struct Test {
  char const* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registration {
  Registration(char const* name, void (*body)()) { tests().push_back({name, body}); }
};

template <class... Seen>
std::string text(Seen const&... seen) {
  std::ostringstream stream;
  stream.precision(9);
  (stream << ... << seen);
  return stream.str();
}

inline bool passes(Test const& test) {
  try {
    test.body();
    return true;
  } catch (std::exception const& failure) {
    std::printf("FAILED %s: %s\n", test.name, failure.what());
    return false;
  }
}

// Runs the tests and gives the exit status.
inline int run() {
  int failed = 0;
  for (Test const& test : tests()) failed += passes(test) ? 0 : 1;
  std::printf("%zu passed, %d failed\n", tests().size() - static_cast<size_t>(failed), failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                         \
  static void name();                                      \
  static check::Registration const of_##name{#name, name}; \
  static void name()

#define CHECK(condition, ...)                                                                              \
  do {                                                                                                     \
    if (!(condition))                                                                                      \
      throw std::runtime_error(check::text(__FILE__, ":", __LINE__, ": ", #condition, "; ", __VA_ARGS__)); \
  } while (false)

#pragma once

#include <chrono>

namespace gloo {
namespace transport {
class UnboundBuffer;
}  // namespace transport

/// Opaque here: only held through pointers that libtorch creates.
class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};
}  // namespace gloo

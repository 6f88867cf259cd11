#pragma once

namespace gloo::transport {
/// Opaque here: only held through pointers that libtorch creates.
class Device;
}  // namespace gloo::transport

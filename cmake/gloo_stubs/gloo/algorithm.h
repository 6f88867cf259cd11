#pragma once

// libtorch_cpu contains gloo, the torch wheel does not ship its headers. These stubs declare only what c10d's
// ProcessGroupGloo.hpp names; the program never constructs any of these types itself.
namespace gloo {
class Algorithm;
}  // namespace gloo

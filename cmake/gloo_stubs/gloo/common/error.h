#pragma once

// c10d's header includes this file without using a name from it.
namespace gloo {}

#pragma once

// Catch2 2.13 (Debian 12) and 3 (Ubuntu 24.04) behind one include.
#ifdef PGPT_CATCH2_V3
#include <catch2/catch_approx.hpp>
#include <catch2/catch_test_macros.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

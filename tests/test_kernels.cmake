pgpt_test(test_kernels TORCH
  SOURCES test_kernels_linear.cpp test_kernels_norm.cpp test_kernels_rope.cpp test_kernels_attention.cpp test_kernels_segments.cpp test_kernels_activation.cpp
    test_kernels_loss.cpp test_kernels_optimizer.cpp test_kernels_random.cpp test_kernels_gpu.cpp test_kernels_clip.cpp
    test_gemm_algorithms.cpp test_kernels_sums.cpp
  LINK pgpt_kernels nlohmann_json::nlohmann_json)
if(PGPT_CUDA)
  # The project's own CUDA kernels; "[.bench]" prints their speed.
  target_sources(test_kernels PRIVATE test_kernels_cuda.cpp test_kernels_cuda_flat.cpp test_kernels_segments_gpu.cpp test_kernels_bench.cpp
    test_gemm_cuda.cpp test_gemm_bench.cpp)
endif()

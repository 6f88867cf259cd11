# Finds libtorch in the project's .venv or in python3, and offers
#   pgpt_torch              libtorch (with CUDA when PGPT_CUDA is on)
#   pgpt_torch_distributed  c10d with the gloo backend, and NCCL when PGPT_CUDA is on

set(PGPT_PYTHON "" CACHE FILEPATH "Python whose torch is used (default: .venv, then python3)")
if(PGPT_PYTHON)
  set(python_candidates ${PGPT_PYTHON})
else()
  find_program(PGPT_PYTHON3 python3)
  set(python_candidates ${CMAKE_SOURCE_DIR}/.venv/bin/python ${PGPT_PYTHON3})
endif()
foreach(candidate ${python_candidates})
  execute_process(
    COMMAND ${candidate} -c "import torch, os; print(os.path.dirname(torch.__file__)); print(torch.__version__); print(int(torch._C._GLIBCXX_USE_CXX11_ABI)); print(torch.version.cuda)"
    OUTPUT_VARIABLE torch_facts RESULT_VARIABLE torch_result OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(torch_result EQUAL 0)
    set(PGPT_PYTHON ${candidate})
    break()
  endif()
endforeach()
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR "No torch found with: ${python_candidates}. Run scripts/setup.sh, or set PGPT_PYTHON to a python that has torch >= 2.11.")
endif()
string(REPLACE "\n" ";" torch_facts "${torch_facts}")
list(GET torch_facts 0 PGPT_TORCH_DIR)
list(GET torch_facts 1 PGPT_TORCH_VERSION)
list(GET torch_facts 2 PGPT_TORCH_CXX11_ABI)
list(GET torch_facts 3 PGPT_TORCH_CUDA)
string(REGEX REPLACE "\\+.*" "" torch_number "${PGPT_TORCH_VERSION}")
if(torch_number VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${PGPT_TORCH_VERSION} in ${PGPT_PYTHON} is too old: 2.11 or newer is needed. Run scripts/setup.sh.")
endif()
get_filename_component(PGPT_SITE_PACKAGES ${PGPT_TORCH_DIR} DIRECTORY)
message(STATUS "libtorch ${PGPT_TORCH_VERSION} from ${PGPT_TORCH_DIR}")

add_library(pgpt_torch INTERFACE)
# libtorch exports std::filesystem functions of a libstdc++ linked into it, some of which call null where no thread library came
# first (remove_all crashes). The real libstdc++ must be found before it.
target_link_libraries(pgpt_torch INTERFACE -lstdc++)
target_include_directories(pgpt_torch SYSTEM INTERFACE ${PGPT_TORCH_DIR}/include ${PGPT_TORCH_DIR}/include/torch/csrc/api/include)
target_compile_definitions(pgpt_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${PGPT_TORCH_CXX11_ABI})
target_link_options(pgpt_torch INTERFACE "-Wl,-rpath,${PGPT_TORCH_DIR}/lib")
if(PGPT_CUDA)
  include(PgptCuda)
  target_compile_definitions(pgpt_torch INTERFACE PGPT_WITH_CUDA)
  target_include_directories(pgpt_torch SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
  # libtorch_cuda registers its operators in static initialisers, so it must stay linked although nothing names it.
  target_link_libraries(pgpt_torch INTERFACE
    "-Wl,--no-as-needed" ${PGPT_TORCH_DIR}/lib/libtorch_cuda.so "-Wl,--as-needed"
    ${PGPT_TORCH_DIR}/lib/libtorch_cpu.so ${PGPT_TORCH_DIR}/lib/libc10_cuda.so ${PGPT_TORCH_DIR}/lib/libc10.so CUDA::cudart)
else()
  message(STATUS "PGPT_CUDA=OFF: CPU-only build, no CUDA kernels and no NCCL backend")
  target_link_libraries(pgpt_torch INTERFACE ${PGPT_TORCH_DIR}/lib/libtorch_cpu.so ${PGPT_TORCH_DIR}/lib/libc10.so)
endif()

add_library(pgpt_torch_distributed INTERFACE)
target_link_libraries(pgpt_torch_distributed INTERFACE pgpt_torch)
# The wheel ships gloo inside libtorch_cpu but not its headers: cmake/gloo_stubs declares the few names c10d's header needs.
target_include_directories(pgpt_torch_distributed SYSTEM INTERFACE ${CMAKE_SOURCE_DIR}/cmake/gloo_stubs)
target_compile_definitions(pgpt_torch_distributed INTERFACE USE_C10D_GLOO)
if(PGPT_CUDA)
  find_path(PGPT_NCCL_INCLUDE nccl.h HINTS ${PGPT_SITE_PACKAGES}/nvidia/nccl/include REQUIRED)
  # The NCCL that torch loads must be the one that is linked: the wheel's, else the system's.
  file(GLOB PGPT_NCCL_LIBRARY ${PGPT_SITE_PACKAGES}/nvidia/nccl/lib/libnccl.so.2)
  if(NOT PGPT_NCCL_LIBRARY)
    find_library(PGPT_NCCL_SYSTEM_LIBRARY NAMES nccl libnccl.so.2 REQUIRED)
    set(PGPT_NCCL_LIBRARY ${PGPT_NCCL_SYSTEM_LIBRARY})
  endif()
  target_link_libraries(pgpt_torch_distributed INTERFACE ${PGPT_NCCL_LIBRARY})
  target_include_directories(pgpt_torch_distributed SYSTEM INTERFACE ${PGPT_NCCL_INCLUDE})
  target_compile_definitions(pgpt_torch_distributed INTERFACE USE_C10D_NCCL)
endif()

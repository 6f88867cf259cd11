# Attention over segments by cuDNN's own kernels needs cudnn-frontend, NVIDIA's headers for cuDNN's graph interface
# (pip wheel nvidia-cudnn-frontend; scripts/setup.sh installs it). Without them libtorch's flash kernel does that work.

set(PGPT_CUDNN_FRONTEND_DIR "" CACHE PATH
  "Folder of cudnn_frontend.h (default: the environment variable of that name, the Python environments, CPATH)")
set(cudnn_frontend_oldest 1.18)

file(GLOB venv_includes ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/include)
find_path(PGPT_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
  HINTS ${PGPT_CUDNN_FRONTEND_DIR} ENV PGPT_CUDNN_FRONTEND_DIR ${PGPT_SITE_PACKAGES}/include ${venv_includes} ENV CPATH)
find_path(PGPT_CUDNN_INCLUDE cudnn.h HINTS ${PGPT_SITE_PACKAGES}/nvidia/cudnn/include)
# The cuDNN that torch loads must be the one that is linked: the wheel's, else the system's.
file(GLOB PGPT_CUDNN_LIBRARY ${PGPT_SITE_PACKAGES}/nvidia/cudnn/lib/libcudnn.so.9)
if(NOT PGPT_CUDNN_LIBRARY)
  find_library(PGPT_CUDNN_SYSTEM_LIBRARY NAMES cudnn libcudnn.so.9)
  set(PGPT_CUDNN_LIBRARY ${PGPT_CUDNN_SYSTEM_LIBRARY})
endif()

set(cudnn_frontend_version 0)
if(PGPT_CUDNN_FRONTEND_INCLUDE)
  file(STRINGS ${PGPT_CUDNN_FRONTEND_INCLUDE}/cudnn_frontend_version.h lines REGEX "define CUDNN_FRONTEND_M[A-Z]+_VERSION")
  string(REGEX REPLACE ".*MAJOR_VERSION ([0-9]+).*MINOR_VERSION ([0-9]+).*" "\\1.\\2" cudnn_frontend_version "${lines}")
endif()

if(NOT PGPT_CUDNN_FRONTEND_INCLUDE OR NOT PGPT_CUDNN_INCLUDE OR NOT PGPT_CUDNN_LIBRARY)
  message(STATUS "attention over segments: libtorch's flash kernel (cudnn-frontend ${PGPT_CUDNN_FRONTEND_INCLUDE}, cuDNN ${PGPT_CUDNN_INCLUDE} ${PGPT_CUDNN_LIBRARY})")
elseif(cudnn_frontend_version VERSION_LESS cudnn_frontend_oldest)
  message(STATUS "attention over segments: libtorch's flash kernel (cudnn-frontend ${cudnn_frontend_version} in ${PGPT_CUDNN_FRONTEND_INCLUDE} is older than ${cudnn_frontend_oldest})")
else()
  message(STATUS "attention over segments: cuDNN, cudnn-frontend ${cudnn_frontend_version} from ${PGPT_CUDNN_FRONTEND_INCLUDE}")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/kernels/attention_cudnn_segments.cpp PROPERTIES
    COMPILE_DEFINITIONS "PGPT_WITH_CUDNN_FRONTEND;CUDNN_FRONTEND_SKIP_JSON_LIB"
    COMPILE_OPTIONS "-isystem;${PGPT_CUDNN_FRONTEND_INCLUDE};-isystem;${PGPT_CUDNN_INCLUDE}"
    SKIP_PRECOMPILE_HEADERS ON)
  target_link_libraries(pgpt_kernels PUBLIC ${PGPT_CUDNN_LIBRARY})
endif()

add_executable(comm_worker comm_worker.cpp comm_worker_copy_engine.cpp)
target_link_libraries(comm_worker PRIVATE pgpt_comm)
pgpt_warnings(comm_worker)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_precompile_headers(comm_worker REUSE_FROM pgpt_pch)
endif()

pgpt_test(test_comm TORCH PROCESSORS 2 TIMEOUT 480
  SOURCES test_comm.cpp test_comm_copy_engine.cpp test_comm_launch.cpp test_comm_processes.cpp
  LINK pgpt_comm)
target_compile_definitions(test_comm PRIVATE PGPT_COMM_WORKER="$<TARGET_FILE:comm_worker>")
add_dependencies(test_comm comm_worker)

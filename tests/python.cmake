# The tests written in Python (standard unittest): files that this project writes must be readable by the programs that
# people use, and its scripts must do what they say.
add_test(NAME test_python COMMAND ${PGPT_PYTHON} ${CMAKE_CURRENT_SOURCE_DIR}/python/run.py)
set_tests_properties(test_python PROPERTIES TIMEOUT 600 PROCESSORS 1
  ENVIRONMENT "OMP_NUM_THREADS=1;PGPT_PROGRAM=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/pretrain_gpt;PGPT_TOOL=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/gpt_tool;PGPT_TEST_DATA=${CMAKE_CURRENT_SOURCE_DIR}/data")

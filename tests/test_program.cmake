pgpt_test(test_program TIMEOUT 900 PROCESSORS 2
  SOURCES test_program.cpp test_program_gpu.cpp test_program_preprocess.cpp test_program_messages.cpp support/seed_run.cpp
  LINK pgpt_data nlohmann_json::nlohmann_json)
add_dependencies(test_program pretrain_gpt gpt_tool)

pgpt_test(test_checkpoint TORCH TIMEOUT 600 PROCESSORS 2
  SOURCES test_checkpoint_files.cpp test_checkpoint_resume.cpp test_checkpoint_layouts.cpp test_checkpoint_options.cpp
          test_checkpoint_faults.cpp test_checkpoint_processes.cpp test_checkpoint_conversion.cpp
          test_checkpoint_leaving.cpp
          test_checkpoint_support.cpp support/thread_ranks.cpp
  LINK pgpt_training)
add_dependencies(test_checkpoint pretrain_gpt gpt_tool)

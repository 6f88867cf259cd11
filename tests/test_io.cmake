pgpt_test(test_io SOURCES test_training_log.cpp test_metrics.cpp test_schedule.cpp test_batching.cpp test_text_table.cpp
  LINK pgpt_training pgpt_optim pgpt_config)

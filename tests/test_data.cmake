pgpt_test(test_data
  SOURCES test_data.cpp test_data_blend.cpp test_data_cache.cpp test_data_files.cpp test_data_loader.cpp test_data_samples.cpp
    test_data_sets.cpp test_data_tokenizer.cpp
  LINK pgpt_data)

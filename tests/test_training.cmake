pgpt_test(test_training TORCH TIMEOUT 600 PROCESSORS 2
  SOURCES test_conformance.cpp test_documents.cpp test_gtp.cpp test_model.cpp test_library_errors.cpp support/thread_ranks.cpp
  LINK pgpt_training)

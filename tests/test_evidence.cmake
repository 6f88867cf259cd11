# Evidence and gpt_tool compare; "[.exactness]" prints the table of docs/exactness.md.
pgpt_test(test_evidence TORCH TIMEOUT 600 PROCESSORS 2
  SOURCES test_evidence.cpp test_evidence_compare.cpp test_evidence_logs.cpp test_evidence_seed.cpp support/thread_ranks.cpp
  LINK pgpt_training)
add_dependencies(test_evidence pretrain_gpt gpt_tool)

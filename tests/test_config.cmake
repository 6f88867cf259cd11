pgpt_test(test_config
  SOURCES test_config.cpp test_config_table.cpp test_config_rules.cpp test_config_runnable.cpp test_config_json.cpp test_config_memory.cpp test_mesh.cpp
          test_config_notices.cpp test_spelling.cpp
  LINK pgpt_config pgpt_mesh nlohmann_json::nlohmann_json)

"""scripts/check_includes.py must find each kind of forbidden include and nothing in a clean tree."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import check_includes  # noqa: E402


class CheckIncludes(unittest.TestCase):
    def problems_of(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            return check_includes.check(root)

    def test_a_clean_tree_has_no_problem(self):
        self.assertEqual(self.problems_of({
            "include/pgpt/base/error.h": "#pragma once\n#include <string>\n",
            "src/base/log.cpp": "#include <spdlog/spdlog.h>\n",
            "src/config/parse.cpp": '#include <cxxopts.hpp>\n#include "pgpt/mesh/mesh.h"\n#include "pgpt/base/error.h"\n',
            "src/comm/nccl.cpp": "#include <nccl.h>\n#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>\n",
            "tests/test_x.cpp": '#include "pgpt/training/trainer.h"\n#include <ATen/ATen.h>\n',
        }), [])

    def test_each_forbidden_include_is_one_problem(self):
        for name, text in (
                ("src/mesh/mesh.cpp", '#include "pgpt/config/config.h"\n'),
                ("src/kernels/adam.cu", '#include "pgpt/comm/world.h"\n'),
                ("src/data/reader.cpp", "#include <ATen/ATen.h>\n"),
                ("src/config/parse.cpp", "# include <c10/core/Device.h>\n"),
                ("src/model/gpt.cpp", "#include <spdlog/spdlog.h>\n"),
                ("apps/pretrain_gpt.cpp", "#include <cxxopts.hpp>\n"),
                ("src/gtp/chain.cpp", "#include <nccl.h>\n"),
                ("src/training/trainer.cpp", "#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>\n"),
                ("include/pgpt/optim/adam.h", '#include "pgpt/kernels/gone.h"\n'),
                ("src/unheard/of.cpp", "int x;\n")):
            with self.subTest(file=name):
                self.assertEqual(len(self.problems_of({name: text})), 1)

    def test_the_option_parser_is_included_once(self):
        text = "#include <cxxopts.hpp>\n"
        self.assertEqual(len(self.problems_of({"src/config/a.cpp": text, "src/config/b.cpp": text})), 1)


if __name__ == "__main__":
    unittest.main()

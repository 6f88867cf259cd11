#!/usr/bin/env python3
"""Runs every test_*.py of this folder and fails when one fails, cannot be imported, or when no test ran at all.

    tests/python/run.py [test_compare_seed ...]

Programs and data come from the environment that ctest sets: PGPT_PROGRAM, PGPT_TOOL, PGPT_TEST_DATA.
"""

import pathlib
import sys
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent


def main():
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(FOLDER))
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(sys.argv[1:]) if sys.argv[1:] else loader.discover(str(FOLDER), pattern="test_*.py")
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    # A suite that is empty, or skips everything, shows nothing.
    executed = result.testsRun - len(result.skipped)
    if executed == 0:
        print("error: no Python test ran", file=sys.stderr)
        return 1
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())

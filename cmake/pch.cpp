// Holds the shared precompiled header; see PgptModule.cmake.

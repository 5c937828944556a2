# manifest_fuzz: the manifest's part of the library, with libFuzzer where the compiler is clang.
set(manifest_sources bundle/manifest bundle/manifest_read bundle/consistency bundle/tensors bundle/plan bundle/noise
  bundle/hashes utf8)
list(TRANSFORM manifest_sources REPLACE "(.+)" "src/\\1.cpp")
add_executable(manifest_fuzz fuzz/manifest.cpp ${manifest_sources})
pass_flags(manifest_fuzz)
target_include_directories(manifest_fuzz PRIVATE src include)
target_link_libraries(manifest_fuzz PRIVATE nlohmann_json::nlohmann_json OpenSSL::Crypto)
if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
  target_compile_options(manifest_fuzz PRIVATE -fsanitize=fuzzer)
  target_link_options(manifest_fuzz PRIVATE -fsanitize=fuzzer)
  target_compile_definitions(manifest_fuzz PRIVATE PASS_LIBFUZZER)
endif()

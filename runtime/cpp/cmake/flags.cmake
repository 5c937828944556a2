# How everything of ours is compiled.
function(pass_flags target)
  target_compile_features(${target} PRIVATE cxx_std_20)
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden C_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> # GCC 12 sees overlaps in std::string that are none
    $<$<BOOL:${PASS_WERROR}>:-Werror>)
  if(PASS_SANITIZE)
    set(sanitize -fsanitize=${PASS_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
    # -O1: half the time to compile. GCC 12 warns of its own std::function in instrumented code.
    target_compile_options(${target} PRIVATE ${sanitize} -O1 $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    target_link_options(${target} PUBLIC ${sanitize})
  endif()
endfunction()

# With sanitizers, the sources of a directory are compiled as one: a fifth of the time, most of which goes to headers.
# Other builds compile each source by itself, and so find a missing #include.
function(pass_unity target)
  if(NOT PASS_SANITIZE)
    return()
  endif()
  get_target_property(files ${target} SOURCES)
  foreach(file ${files})
    cmake_path(GET file PARENT_PATH directory)
    string(MAKE_C_IDENTIFIER "${directory}" group)
    set_source_files_properties(${file} PROPERTIES UNITY_GROUP ${group})
  endforeach()
  # Joined sources may shadow each other's names, so only the other builds have -Wshadow.
  target_compile_options(${target} PRIVATE -Wno-shadow)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

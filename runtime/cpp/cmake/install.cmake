# find_package(pass) and pkg-config: the libraries, the headers, and their descriptions. A program links pass::pass or
# pass::static.
include(CMakePackageConfigHelpers)

install(TARGETS pass pass_static EXPORT passTargets)
install(DIRECTORY include/pass DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/pass)
install(EXPORT passTargets NAMESPACE pass:: DESTINATION ${package})
configure_package_config_file(cmake/passConfig.cmake.in passConfig.cmake INSTALL_DESTINATION ${package})
write_basic_package_version_file(passConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/passConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/passConfigVersion.cmake
  DESTINATION ${package})

file(RELATIVE_PATH PASS_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" PASS_PC_PREFIX ${PASS_PC_PREFIX})
configure_file(cmake/pass.pc.in pass.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pass.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

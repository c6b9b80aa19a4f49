# cmake --install puts headers, both libraries and the find_package(tidegate) files in place.
include(CMakePackageConfigHelpers)
if(SKBUILD)
  return()  # a wheel carries the torch adapter only
endif()
install(TARGETS tidegate_static tidegate_shared EXPORT tidegateTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/tidegate DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT tidegateTargets NAMESPACE tidegate:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tidegate)
configure_package_config_file(cmake/tidegateConfig.cmake.in ${PROJECT_BINARY_DIR}/tidegateConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tidegate)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tidegateConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tidegateConfig.cmake ${PROJECT_BINARY_DIR}/tidegateConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/tidegate)

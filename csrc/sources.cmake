# The sources of plans and their runner, which both the extension and the native tests are built from.
file(GLOB OCTAVO_CORE CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/plan/*.cpp" "${CMAKE_CURRENT_LIST_DIR}/runtime/*.cpp")
file(GLOB OCTAVO_BINDINGS CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/bindings/*.cpp")

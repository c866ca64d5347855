"""Ways to plug the service into other libraries. Each module here needs the library it is named after."""

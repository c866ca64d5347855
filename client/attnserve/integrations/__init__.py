"""Integrations with other libraries. Each module here needs the library it is named after."""

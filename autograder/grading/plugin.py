"""The pytest plugin: points per problem, credit per check."""

"""What every room may read: data and arithmetic on integers, that import nothing else of the project. No torch."""

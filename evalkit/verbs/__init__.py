"""What each command does: arguments in, a `Result` out."""

"""Who may use a fleet's engines, and in which order. (Interface first; see `hold_fleet`.)"""

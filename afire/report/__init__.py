"""What people look at: tables, figures and pages.

Knows the results of every room; computes nothing that a result should hold, and knows no command.
"""

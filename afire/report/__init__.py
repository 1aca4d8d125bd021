"""What people look at: tables, figures and pages.

Knows the results of every room; computes nothing that belongs in a result, and knows no command.
"""

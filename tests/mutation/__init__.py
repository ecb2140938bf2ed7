"""Small faults sown one at a time: does a test notice each of them?"""

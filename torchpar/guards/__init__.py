"""The lessons of `torchpar.manual` for any module, guarded against misuse: what `torchpar` exports.

A guard is attached from outside: a class here extends a lesson's, and overrides what the lesson calls. No
lesson imports a guard.
"""

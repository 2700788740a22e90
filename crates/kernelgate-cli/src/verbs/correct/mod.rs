//! Verbs of kernelgate that list cases and compare their outputs with a reference.

pub mod list;
pub mod numerics;
pub mod verified;
pub mod verify;

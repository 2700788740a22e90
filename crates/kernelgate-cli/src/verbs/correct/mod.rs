//! Verbs that list cases and check their outputs.

pub mod list;
pub mod numerics;
pub mod verified;
pub mod verify;

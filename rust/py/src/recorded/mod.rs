//! Recording: outputs of a model's layers, added to the output of its forward.

pub mod call;
pub mod installation;
pub mod layer;

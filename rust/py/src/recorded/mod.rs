//! Recording: outputs of a model's layers, put into what its forward returns.

pub mod call;
pub mod installation;
pub mod layer;
pub mod tree;

//! Builds a graph of cuDNN operations, makes an execution plan for the graph, and enqueues the
//! plan.

use std::sync::Arc;

use super::api::{
    self, CudnnAttribute as A, CudnnAttributeValue, CudnnDataType, CudnnDescriptor,
    CudnnDescriptorKind, CudnnHandle, CudnnPointwiseMode, CudnnRawPointer, CudnnReductionOperator,
    CudnnUnsupported,
};
use crate::BackendError;
use crate::{Device, DeviceBuffer};

/// Smallest alignment in bytes of the address of every tensor in a cuDNN graph.
const MIN_TENSOR_ALIGNMENT_BYTES: i64 = 16;

/// Extents and strides of a four-dimensional tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorExtentsAndStrides {
    /// Extent of each axis in elements, the outermost axis first.
    pub extents: [i64; 4],
    /// For each axis, the distance in elements from one index to the next.
    pub strides: [i64; 4],
}

impl TensorExtentsAndStrides {
    /// Returns the strides of a contiguous tensor in which the last axis varies fastest.
    pub const fn contiguous_for_extents(extents: [i64; 4]) -> TensorExtentsAndStrides {
        let [_, h, s, d] = extents;
        Self { extents, strides: [h * s * d, s * d, d, 1] }
    }

    /// Returns a layout of the same memory in which the last two axes are exchanged.
    pub const fn with_last_axes_exchanged(self) -> Self {
        let ([b, h, s, d], [by_b, by_h, by_s, by_d]) = (self.extents, self.strides);
        Self { extents: [b, h, d, s], strides: [by_b, by_h, by_d, by_s] }
    }
}

/// A tensor of a cuDNN operation graph, by its index in the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudnnGraphTensor(usize);

impl CudnnGraphTensor {
    /// cuDNN's number of the tensor, which is unique in its graph.
    const fn tensor_id(self) -> i64 {
        self.0 as i64 + 1
    }
}

/// A graph under construction. An operation must be added before the operations that use its
/// result.
#[derive(Default)]
pub struct CudnnOperationGraphBuilder {
    // The fields are dropped in this order, because descriptors of operations refer to descriptors
    // of tensors.
    operations: Vec<CudnnDescriptor>,
    operation_mode_descriptors: Vec<CudnnDescriptor>,
    tensors: Vec<CudnnDescriptor>,
    scalars: Vec<(CudnnGraphTensor, f32)>,
}

impl CudnnOperationGraphBuilder {
    /// Adds a tensor that lies in device memory to the graph.
    ///
    /// # Errors
    /// Fails if cuDNN refuses the tensor's descriptor.
    pub fn add_memory_tensor(
        &mut self,
        layout: TensorExtentsAndStrides,
        data_type: CudnnDataType,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        self.add_tensor_with_flag(layout, data_type, None)
    }

    /// Adds a virtual tensor: the result of an operation that only another operation of the graph
    /// uses, so that cuDNN need not store it.
    pub fn add_virtual_tensor(
        &mut self,
        layout: TensorExtentsAndStrides,
        data_type: CudnnDataType,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        self.add_tensor_with_flag(layout, data_type, Some(A::TensorIsVirtual))
    }

    /// Adds a tensor with a single f32 element, whose value is fixed when the plan is made.
    ///
    /// # Errors
    /// Fails if cuDNN refuses the descriptor.
    pub fn add_scalar_constant(
        &mut self,
        value: f32,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        let tensor = self.add_tensor_with_flag(
            TensorExtentsAndStrides::contiguous_for_extents([1; 4]),
            CudnnDataType::F32,
            Some(A::TensorIsByValue),
        )?;
        self.scalars.push((tensor, value));
        Ok(tensor)
    }

    fn add_tensor_with_flag(
        &mut self,
        layout: TensorExtentsAndStrides,
        data_type: CudnnDataType,
        flag: Option<A>,
    ) -> Result<CudnnGraphTensor, CudnnUnsupported> {
        let tensor = CudnnGraphTensor(self.tensors.len());
        let id = [tensor.tensor_id()];
        let mut attributes = vec![
            (A::TensorDataType, CudnnAttributeValue::DataType(data_type)),
            (A::TensorDimensions, CudnnAttributeValue::Integers(&layout.extents)),
            (A::TensorStrides, CudnnAttributeValue::Integers(&layout.strides)),
            (A::TensorUniqueId, CudnnAttributeValue::Integers(&id)),
            (A::TensorByteAlignment, CudnnAttributeValue::Integers(&[MIN_TENSOR_ALIGNMENT_BYTES])),
        ];
        attributes.extend(flag.map(|flag| (flag, CudnnAttributeValue::Boolean(true))));
        self.tensors.push(CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::Tensor,
            &attributes,
        )?);
        Ok(tensor)
    }

    /// Adds the operation c = a b, a matrix product over the last two axes that is summed in fp32.
    pub fn add_matmul(
        &mut self,
        a: CudnnGraphTensor,
        b: CudnnGraphTensor,
        c: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        let part = CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::Matmul,
            &[(A::MatmulComputeType, CudnnAttributeValue::DataType(CudnnDataType::F32))],
        )?;
        let [a, b, c] = [a, b, c].map(|tensor| [&self.tensors[tensor.0]]);
        let attributes = [
            (A::MatmulOperationA, CudnnAttributeValue::Descriptors(&a)),
            (A::MatmulOperationB, CudnnAttributeValue::Descriptors(&b)),
            (A::MatmulOperationC, CudnnAttributeValue::Descriptors(&c)),
            (A::MatmulOperationDescriptor, CudnnAttributeValue::Descriptors(&[&part])),
        ];
        self.operations.push(CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::MatmulOperation,
            &attributes,
        )?);
        self.operation_mode_descriptors.push(part);
        Ok(())
    }

    /// Adds the pointwise operation y = mode(inputs), with one to three inputs, computed in fp32.
    pub fn add_pointwise_in_fp32(
        &mut self,
        mode: CudnnPointwiseMode,
        inputs: &[CudnnGraphTensor],
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        self.add_pointwise_with_precision(CudnnDataType::F32, mode, &[], inputs, y)
    }

    /// Adds the operation y = index of each element of x along `axis`, a 32-bit integer.
    pub fn add_index_along_axis(
        &mut self,
        axis: i64,
        x: CudnnGraphTensor,
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        let axis = [axis];
        self.add_pointwise_with_precision(
            CudnnDataType::F32,
            CudnnPointwiseMode::GenerateIndex,
            &[(A::PointwiseAxis, CudnnAttributeValue::Integers(&axis))],
            &[x],
            y,
        )
    }

    /// Adds the pointwise operation y = (x >= b), whose result is a boolean.
    pub fn add_greater_or_equal(
        &mut self,
        x: CudnnGraphTensor,
        b: CudnnGraphTensor,
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        self.add_pointwise_with_precision(
            CudnnDataType::Boolean,
            CudnnPointwiseMode::GreaterOrEqual,
            &[],
            &[x, b],
            y,
        )
    }

    fn add_pointwise_with_precision(
        &mut self,
        precision: CudnnDataType,
        mode: CudnnPointwiseMode,
        more: &[(A, CudnnAttributeValue<'_>)],
        inputs: &[CudnnGraphTensor],
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        let own = [
            (A::PointwiseMode, CudnnAttributeValue::PointwiseMode(mode)),
            (A::PointwiseMathPrecision, CudnnAttributeValue::DataType(precision)),
        ];
        let part = CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::Pointwise,
            &[&own, more].concat(),
        )?;
        let inputs: Vec<[&CudnnDescriptor; 1]> =
            inputs.iter().map(|input| [&self.tensors[input.0]]).collect();
        let (part_of, y) = ([&part], [&self.tensors[y.0]]);
        let mut attributes = vec![
            (A::PointwiseOperationDescriptor, CudnnAttributeValue::Descriptors(&part_of)),
            (A::PointwiseOperationY, CudnnAttributeValue::Descriptors(&y)),
        ];
        let ports = [A::PointwiseOperationX, A::PointwiseOperationB, A::PointwiseOperationT];
        attributes.extend(
            ports
                .into_iter()
                .zip(&inputs)
                .map(|(port, input)| (port, CudnnAttributeValue::Descriptors(input))),
        );
        attributes.push((A::PointwiseOperationAlpha1, CudnnAttributeValue::Float(1.0)));
        attributes.push((A::PointwiseOperationAlpha2, CudnnAttributeValue::Float(1.0)));
        self.operations.push(CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::PointwiseOperation,
            &attributes,
        )?);
        self.operation_mode_descriptors.push(part);
        Ok(())
    }

    /// Adds the operation y = x reduced in fp32 over all axes along which y has one element.
    pub fn add_reduction(
        &mut self,
        operator: CudnnReductionOperator,
        x: CudnnGraphTensor,
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        let own = [
            (A::ReductionOperator, CudnnAttributeValue::ReductionOperator(operator)),
            (A::ReductionComputeType, CudnnAttributeValue::DataType(CudnnDataType::F32)),
        ];
        let part =
            CudnnDescriptor::create_and_finalize_descriptor(CudnnDescriptorKind::Reduction, &own)?;
        let [x, y] = [x, y].map(|tensor| [&self.tensors[tensor.0]]);
        let attributes = [
            (A::ReductionOperationX, CudnnAttributeValue::Descriptors(&x)),
            (A::ReductionOperationY, CudnnAttributeValue::Descriptors(&y)),
            (A::ReductionOperationDescriptor, CudnnAttributeValue::Descriptors(&[&part])),
        ];
        self.operations.push(CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::ReductionOperation,
            &attributes,
        )?);
        self.operation_mode_descriptors.push(part);
        Ok(())
    }

    /// Adds the operation y = x with the shape, strides and perhaps the element type of y.
    pub fn add_reshape(
        &mut self,
        x: CudnnGraphTensor,
        y: CudnnGraphTensor,
    ) -> Result<(), CudnnUnsupported> {
        let [x, y] = [x, y].map(|tensor| [&self.tensors[tensor.0]]);
        let attributes = [
            (A::ReshapeOperationX, CudnnAttributeValue::Descriptors(&x)),
            (A::ReshapeOperationY, CudnnAttributeValue::Descriptors(&y)),
        ];
        self.operations.push(CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::ReshapeOperation,
            &attributes,
        )?);
        Ok(())
    }

    /// All operations together. Without a cuDNN handle, cuDNN checks the operations but cannot make
    /// a plan.
    pub fn operation_graph_descriptor(
        &self,
        handle: Option<&CudnnHandle>,
    ) -> Result<CudnnDescriptor, CudnnUnsupported> {
        let operations: Vec<&CudnnDescriptor> = self.operations.iter().collect();
        let mut attributes =
            vec![(A::GraphOperations, CudnnAttributeValue::Descriptors(&operations))];
        attributes.extend(
            handle.map(|handle| (A::OperationGraphHandle, CudnnAttributeValue::Handle(handle))),
        );
        CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::OperationGraph,
            &attributes,
        )
    }

    /// Makes the execution plan that cuDNN's heuristic ranks first among those that can be built,
    /// for these addresses of tensors in device memory.
    ///
    /// # Errors
    /// Fails if cuDNN has no plan for the graph, or too little device memory is free.
    pub fn into_execution_plan(
        self,
        device: &Arc<Device>,
        memory: &[(CudnnGraphTensor, u64)],
    ) -> Result<CudnnExecutionPlan, BackendError> {
        let handle = CudnnHandle::new(device)?;
        let graph = self.operation_graph_descriptor(Some(&handle))?;
        let heuristics = CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::Heuristics,
            &[
                (A::HeuristicsOperationGraph, CudnnAttributeValue::Descriptors(&[&graph])),
                (A::HeuristicsMode, CudnnAttributeValue::RecommendedHeuristicMode),
            ],
        )?;
        let configs = heuristics
            .read_descriptors_attribute(A::HeuristicsResults, CudnnDescriptorKind::EngineConfig)?;
        let (plan, config) = first_plan_that_cudnn_builds(&handle, configs)?;
        let workspace =
            device.allocate(plan.read_integer_attribute(A::PlanWorkspaceSize)?.max(0) as usize)?;

        let values: Box<[f32]> = self.scalars.iter().map(|(_, value)| *value).collect();
        let pack = self.variant_pack_descriptor(memory, &values, workspace.device_address())?;
        let made_of = vec![config, heuristics, graph];
        Ok(CudnnExecutionPlan {
            variant_pack: pack,
            plan,
            _kept_descriptors: made_of,
            _graph: self,
            handle,
            workspace,
            _scalars: values,
        })
    }
}

impl CudnnOperationGraphBuilder {
    /// Descriptor of the device addresses of the tensors, the host addresses of the scalars, and
    /// the workspace.
    fn variant_pack_descriptor(
        &self,
        memory: &[(CudnnGraphTensor, u64)],
        values: &[f32],
        workspace: u64,
    ) -> Result<CudnnDescriptor, CudnnUnsupported> {
        // cuDNN reads a scalar at its host address when the plan is enqueued.
        let scalars = self
            .scalars
            .iter()
            .zip(values)
            .map(|((tensor, _), value)| (*tensor, std::ptr::from_ref(value) as u64));
        let (ids, addresses): (Vec<i64>, Vec<CudnnRawPointer>) = memory
            .iter()
            .copied()
            .chain(scalars)
            .map(|(tensor, address)| (tensor.tensor_id(), address as CudnnRawPointer))
            .unzip();
        let attributes = [
            (A::PackDataPointers, CudnnAttributeValue::Pointers(&addresses)),
            (A::PackUniqueIds, CudnnAttributeValue::Integers(&ids)),
            (A::PackWorkspace, CudnnAttributeValue::Pointers(&[workspace as CudnnRawPointer])),
        ];
        CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::VariantPack,
            &attributes,
        )
    }
}

/// Builds the first plan that cuDNN supports among the proposed engines; the error is the reason
/// why the first proposal cannot be built.
fn first_plan_that_cudnn_builds(
    handle: &CudnnHandle,
    configs: Vec<CudnnDescriptor>,
) -> Result<(CudnnDescriptor, CudnnDescriptor), CudnnUnsupported> {
    let mut first_refusal = None;
    for config in configs {
        let attributes = [
            (A::PlanHandle, CudnnAttributeValue::Handle(handle)),
            (A::PlanEngineConfig, CudnnAttributeValue::Descriptors(&[&config])),
        ];
        match CudnnDescriptor::create_and_finalize_descriptor(
            CudnnDescriptorKind::ExecutionPlan,
            &attributes,
        ) {
            Ok(plan) => return Ok((plan, config)),
            Err(refusal) => first_refusal = first_refusal.or(Some(refusal)),
        }
    }
    Err(first_refusal
        .unwrap_or_else(|| CudnnUnsupported("cuDNN has no engine for this".to_owned())))
}

/// A cuDNN execution plan with the addresses of its tensors, scalars and workspace.
pub struct CudnnExecutionPlan {
    // The fields are dropped in this order, because each field refers to later ones.
    variant_pack: CudnnDescriptor,
    plan: CudnnDescriptor,
    _kept_descriptors: Vec<CudnnDescriptor>,
    _graph: CudnnOperationGraphBuilder,
    handle: CudnnHandle,
    workspace: DeviceBuffer,
    _scalars: Box<[f32]>,
}

impl CudnnExecutionPlan {
    /// Enqueues the execution plan on the device's stream.
    ///
    /// The tensors' addresses, with which the plan was made, must be valid until the work has
    /// finished.
    pub fn enqueue_cudnn_plan(&self) -> Result<(), BackendError> {
        // SAFETY: the pack was made for this plan; workspace and scalars live in `self`; the
        // tensors' addresses are used only on the device.
        unsafe { api::enqueue_execution_plan(&self.handle, &self.plan, &self.variant_pack) }
    }

    /// Bytes of device memory that the plan needs as workspace.
    pub fn workspace_size_in_bytes(&self) -> usize {
        self.workspace.size_in_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exchanging_the_last_axes_changes_no_memory() {
        let layout = TensorExtentsAndStrides::contiguous_for_extents([2, 3, 5, 7]);
        assert_eq!(layout.strides, [105, 35, 7, 1]);
        let transposed =
            TensorExtentsAndStrides { extents: [2, 3, 7, 5], strides: [105, 35, 1, 7] };
        assert_eq!(
            (layout.with_last_axes_exchanged(), transposed.with_last_axes_exchanged()),
            (transposed, layout)
        );
    }

    #[test]
    fn a_variant_pack_takes_tensor_and_scalar_addresses() {
        if let Err(refusal) = api::found_cudnn_version() {
            eprintln!("skipped: {refusal}");
            return;
        }
        let mut graph = CudnnOperationGraphBuilder::default();
        let layout = TensorExtentsAndStrides::contiguous_for_extents([1, 2, 64, 64]);
        let x = graph.add_memory_tensor(layout, CudnnDataType::Bf16).unwrap();
        let y = graph.add_memory_tensor(layout, CudnnDataType::Bf16).unwrap();
        let factor = graph.add_scalar_constant(2.0).unwrap();
        graph.add_pointwise_in_fp32(CudnnPointwiseMode::Multiply, &[x, factor], y).unwrap();
        assert!(graph.operation_graph_descriptor(None).is_ok());
        // cuDNN stores the tensor addresses in the pack without reading the memory at these
        // addresses.
        assert!(graph.variant_pack_descriptor(&[(x, 0x1000), (y, 0x2000)], &[2.0], 0x3000).is_ok());
    }
}

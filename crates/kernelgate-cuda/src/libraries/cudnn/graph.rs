//! Describes a graph of operations, makes a cuDNN plan for it and executes the plan.

use std::sync::Arc;

use super::api::{
    self, CudnnAttribute as A, CudnnAttributeValue, CudnnDataType, CudnnDescriptor,
    CudnnDescriptorKind, CudnnHandle, CudnnPointwiseMode, CudnnRefusal, OperationDescriptor,
    RawPtr,
};
use crate::BackendError;
use crate::{Device, DeviceBuffer};

/// Alignment that every tensor here has at least, bytes.
const TENSOR_ALIGNMENT_BYTES: i64 = 16;

/// Extents and strides of a tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorLayout {
    /// Extent of each axis in elements, the outermost axis first.
    pub extents: [i64; 4],
    /// Distance in elements between consecutive indices of each axis.
    pub strides: [i64; 4],
}

impl TensorLayout {
    /// Contiguous, last extent fastest.
    pub const fn contiguous(extents: [i64; 4]) -> TensorLayout {
        let [_, h, s, d] = extents;
        Self { extents, strides: [h * s * d, s * d, d, 1] }
    }

    /// Describes the tensor's memory with its last two axes exchanged.
    pub const fn transposed_layout(self) -> Self {
        let ([b, h, s, d], [by_b, by_h, by_s, by_d]) = (self.extents, self.strides);
        Self { extents: [b, h, d, s], strides: [by_b, by_h, by_d, by_s] }
    }
}

/// A tensor of a cuDNN graph, by its index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GraphTensor(usize);

impl GraphTensor {
    /// Number of the tensor, unique in its graph.
    const fn id(self) -> i64 {
        self.0 as i64 + 1
    }
}

/// A graph under construction. Operations must be added before the operations that depend on them.
#[derive(Default)]
pub struct CudnnOperationGraph {
    // The fields are dropped in this order, because operations refer to tensors.
    operations: Vec<CudnnDescriptor>,
    parts: Vec<CudnnDescriptor>,
    tensors: Vec<CudnnDescriptor>,
    scalars: Vec<(GraphTensor, f32)>,
}

impl CudnnOperationGraph {
    /// Adds a tensor in device memory to the graph.
    ///
    /// # Errors
    /// Fails if cuDNN refuses the tensor, as do the further methods.
    pub fn add_memory_tensor(
        &mut self,
        layout: TensorLayout,
        data_type: CudnnDataType,
    ) -> Result<GraphTensor, CudnnRefusal> {
        self.add_tensor(layout, data_type, None)
    }

    /// A tensor that need not exist: what one operation hands to another.
    pub fn add_virtual_tensor(
        &mut self,
        layout: TensorLayout,
        data_type: CudnnDataType,
    ) -> Result<GraphTensor, CudnnRefusal> {
        self.add_tensor(layout, data_type, Some(A::TensorIsVirtual))
    }

    /// Adds a tensor of one f32 element with a value that is fixed in the plan.
    ///
    /// # Errors
    /// Fails if cuDNN refuses the descriptor.
    pub fn add_scalar_tensor(&mut self, value: f32) -> Result<GraphTensor, CudnnRefusal> {
        let tensor = self.add_tensor(
            TensorLayout::contiguous([1; 4]),
            CudnnDataType::F32,
            Some(A::TensorIsByValue),
        )?;
        self.scalars.push((tensor, value));
        Ok(tensor)
    }

    fn add_tensor(
        &mut self,
        layout: TensorLayout,
        data_type: CudnnDataType,
        flag: Option<A>,
    ) -> Result<GraphTensor, CudnnRefusal> {
        let tensor = GraphTensor(self.tensors.len());
        let id = [tensor.id()];
        let mut attributes = vec![
            (A::TensorDataType, CudnnAttributeValue::DataType(data_type)),
            (A::TensorDimensions, CudnnAttributeValue::Integers(&layout.extents)),
            (A::TensorStrides, CudnnAttributeValue::Integers(&layout.strides)),
            (A::TensorUniqueId, CudnnAttributeValue::Integers(&id)),
            (A::TensorByteAlignment, CudnnAttributeValue::Integers(&[TENSOR_ALIGNMENT_BYTES])),
        ];
        attributes.extend(flag.map(|flag| (flag, CudnnAttributeValue::Flag(true))));
        self.tensors
            .push(CudnnDescriptor::finished_descriptor(CudnnDescriptorKind::Tensor, &attributes)?);
        Ok(tensor)
    }

    /// c = a b over the last two axes, summed in fp32.
    pub fn add_matmul(
        &mut self,
        a: GraphTensor,
        b: GraphTensor,
        c: GraphTensor,
    ) -> Result<(), CudnnRefusal> {
        let part = CudnnDescriptor::finished_descriptor(
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
        self.operations.push(CudnnDescriptor::finished_descriptor(
            CudnnDescriptorKind::MatmulOperation,
            &attributes,
        )?);
        self.parts.push(part);
        Ok(())
    }

    /// Adds y = mode(inputs) with one to three inputs, in fp32.
    pub fn add_pointwise(
        &mut self,
        mode: CudnnPointwiseMode,
        inputs: &[GraphTensor],
        y: GraphTensor,
    ) -> Result<(), CudnnRefusal> {
        self.add_pointwise_in(CudnnDataType::F32, mode, &[], inputs, y)
    }

    /// y = the index of each element of x along `axis`, an integer of 32 bits.
    pub fn index(&mut self, axis: i64, x: GraphTensor, y: GraphTensor) -> Result<(), CudnnRefusal> {
        let axis = [axis];
        self.add_pointwise_in(
            CudnnDataType::F32,
            CudnnPointwiseMode::Index,
            &[(A::PointwiseAxis, CudnnAttributeValue::Integers(&axis))],
            &[x],
            y,
        )
    }

    /// Adds the operation y = (x >= b), whose result is a truth value.
    pub fn add_greater_or_equal(
        &mut self,
        x: GraphTensor,
        b: GraphTensor,
        y: GraphTensor,
    ) -> Result<(), CudnnRefusal> {
        self.add_pointwise_in(
            CudnnDataType::Boolean,
            CudnnPointwiseMode::GreaterOrEqual,
            &[],
            &[x, b],
            y,
        )
    }

    fn add_pointwise_in(
        &mut self,
        precision: CudnnDataType,
        mode: CudnnPointwiseMode,
        more: &[(A, CudnnAttributeValue<'_>)],
        inputs: &[GraphTensor],
        y: GraphTensor,
    ) -> Result<(), CudnnRefusal> {
        let own = [
            (A::PointwiseMode, CudnnAttributeValue::Mode(mode)),
            (A::PointwiseMathPrecision, CudnnAttributeValue::DataType(precision)),
        ];
        let part = CudnnDescriptor::finished_descriptor(
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
        self.operations.push(CudnnDescriptor::finished_descriptor(
            CudnnDescriptorKind::PointwiseOperation,
            &attributes,
        )?);
        self.parts.push(part);
        Ok(())
    }

    /// y = x reduced, in fp32, over the axes along which y has one element.
    pub fn add_reduction(
        &mut self,
        operator: OperationDescriptor,
        x: GraphTensor,
        y: GraphTensor,
    ) -> Result<(), CudnnRefusal> {
        let own = [
            (A::ReductionOperator, CudnnAttributeValue::Operator(operator)),
            (A::ReductionComputeType, CudnnAttributeValue::DataType(CudnnDataType::F32)),
        ];
        let part = CudnnDescriptor::finished_descriptor(CudnnDescriptorKind::Reduction, &own)?;
        let [x, y] = [x, y].map(|tensor| [&self.tensors[tensor.0]]);
        let attributes = [
            (A::ReductionOperationX, CudnnAttributeValue::Descriptors(&x)),
            (A::ReductionOperationY, CudnnAttributeValue::Descriptors(&y)),
            (A::ReductionOperationDescriptor, CudnnAttributeValue::Descriptors(&[&part])),
        ];
        self.operations.push(CudnnDescriptor::finished_descriptor(
            CudnnDescriptorKind::ReductionOperation,
            &attributes,
        )?);
        self.parts.push(part);
        Ok(())
    }

    /// y = x in the layout, and perhaps the type, of y.
    pub fn add_reshape(&mut self, x: GraphTensor, y: GraphTensor) -> Result<(), CudnnRefusal> {
        let [x, y] = [x, y].map(|tensor| [&self.tensors[tensor.0]]);
        let attributes = [
            (A::ReshapeOperationX, CudnnAttributeValue::Descriptors(&x)),
            (A::ReshapeOperationY, CudnnAttributeValue::Descriptors(&y)),
        ];
        self.operations.push(CudnnDescriptor::finished_descriptor(
            CudnnDescriptorKind::ReshapeOperation,
            &attributes,
        )?);
        Ok(())
    }

    /// All operations together. Without a handle cuDNN checks the operations, but cannot plan them.
    pub fn operation_graph(
        &self,
        handle: Option<&CudnnHandle>,
    ) -> Result<CudnnDescriptor, CudnnRefusal> {
        let operations: Vec<&CudnnDescriptor> = self.operations.iter().collect();
        let mut attributes =
            vec![(A::GraphOperations, CudnnAttributeValue::Descriptors(&operations))];
        attributes
            .extend(handle.map(|handle| (A::GraphHandle, CudnnAttributeValue::Handle(handle))));
        CudnnDescriptor::finished_descriptor(CudnnDescriptorKind::OperationGraph, &attributes)
    }

    /// Builds the plan that cuDNN's heuristic ranks first among the plans that it can build, for
    /// the given addresses of tensors in memory.
    ///
    /// # Errors
    /// Fails if cuDNN has none, or memory is short.
    pub fn into_execution_plan(
        self,
        device: &Arc<Device>,
        memory: &[(GraphTensor, u64)],
    ) -> Result<CudnnExecutionPlan, BackendError> {
        let handle = CudnnHandle::new(device)?;
        let graph = self.operation_graph(Some(&handle))?;
        let heuristics = CudnnDescriptor::finished_descriptor(
            CudnnDescriptorKind::Heuristics,
            &[
                (A::HeuristicsOperationGraph, CudnnAttributeValue::Descriptors(&[&graph])),
                (A::HeuristicsMode, CudnnAttributeValue::Heuristic),
            ],
        )?;
        let configs =
            heuristics.read_descriptors(A::HeuristicsResults, CudnnDescriptorKind::EngineConfig)?;
        let (plan, config) = first_buildable_plan(&handle, configs)?;
        let workspace = device.allocate(plan.integer(A::PlanWorkspaceSize)?.max(0) as usize)?;

        let values: Box<[f32]> = self.scalars.iter().map(|(_, value)| *value).collect();
        let pack = self.variant_pack(memory, &values, workspace.address())?;
        let made_of = vec![config, heuristics, graph];
        Ok(CudnnExecutionPlan {
            pack,
            plan,
            _made_of: made_of,
            _graph: self,
            handle,
            workspace,
            _scalars: values,
        })
    }
}

impl CudnnOperationGraph {
    /// Addresses of the tensors in memory, of the scalars on the host, and of the workspace.
    fn variant_pack(
        &self,
        memory: &[(GraphTensor, u64)],
        values: &[f32],
        workspace: u64,
    ) -> Result<CudnnDescriptor, CudnnRefusal> {
        // cuDNN reads a number at its address on the host when the plan runs.
        let scalars = self
            .scalars
            .iter()
            .zip(values)
            .map(|((tensor, _), value)| (*tensor, std::ptr::from_ref(value) as u64));
        let (ids, addresses): (Vec<i64>, Vec<RawPtr>) = memory
            .iter()
            .copied()
            .chain(scalars)
            .map(|(tensor, address)| (tensor.id(), address as RawPtr))
            .unzip();
        let attributes = [
            (A::PackDataPointers, CudnnAttributeValue::Pointers(&addresses)),
            (A::PackUniqueIds, CudnnAttributeValue::Integers(&ids)),
            (A::PackWorkspace, CudnnAttributeValue::Pointers(&[workspace as RawPtr])),
        ];
        CudnnDescriptor::finished_descriptor(CudnnDescriptorKind::VariantPack, &attributes)
    }
}

/// Builds the first plan that any of cuDNN's engines supports; the error is the reason why the
/// first proposal cannot be built.
fn first_buildable_plan(
    handle: &CudnnHandle,
    configs: Vec<CudnnDescriptor>,
) -> Result<(CudnnDescriptor, CudnnDescriptor), CudnnRefusal> {
    let mut first_refusal = None;
    for config in configs {
        let attributes = [
            (A::PlanHandle, CudnnAttributeValue::Handle(handle)),
            (A::PlanEngineConfig, CudnnAttributeValue::Descriptors(&[&config])),
        ];
        match CudnnDescriptor::finished_descriptor(CudnnDescriptorKind::ExecutionPlan, &attributes)
        {
            Ok(plan) => return Ok((plan, config)),
            Err(refusal) => first_refusal = first_refusal.or(Some(refusal)),
        }
    }
    Err(first_refusal.unwrap_or_else(|| CudnnRefusal("cuDNN has no engine for this".to_owned())))
}

/// A graph made executable, with the addresses that it works on.
pub struct CudnnExecutionPlan {
    // The fields are dropped in this order, because each field refers to later fields.
    pack: CudnnDescriptor,
    plan: CudnnDescriptor,
    _made_of: Vec<CudnnDescriptor>,
    _graph: CudnnOperationGraph,
    handle: CudnnHandle,
    workspace: DeviceBuffer,
    _scalars: Box<[f32]>,
}

impl CudnnExecutionPlan {
    /// Enqueues the plan on the device's stream.
    ///
    /// The addresses that the plan was made with must be alive until the work has finished.
    pub fn launch_plan(&self) -> Result<(), BackendError> {
        // SAFETY: the pack was made for this plan; workspace and numbers live in `self`; the
        // tensors' addresses are used on the device only.
        unsafe { api::execute_plan(&self.handle, &self.plan, &self.pack) }
    }

    /// Device memory that the engine asked for besides the tensors, bytes.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_layout_describes_the_memory_unchanged() {
        let layout = TensorLayout::contiguous([2, 3, 5, 7]);
        assert_eq!(layout.strides, [105, 35, 7, 1]);
        let transposed = TensorLayout { extents: [2, 3, 7, 5], strides: [105, 35, 1, 7] };
        assert_eq!(
            (layout.transposed_layout(), transposed.transposed_layout()),
            (transposed, layout)
        );
    }

    #[test]
    fn the_variant_pack_holds_tensor_addresses_and_numbers() {
        if let Err(refusal) = api::cudnn_version() {
            eprintln!("skipped: {refusal}");
            return;
        }
        let mut graph = CudnnOperationGraph::default();
        let layout = TensorLayout::contiguous([1, 2, 64, 64]);
        let x = graph.add_memory_tensor(layout, CudnnDataType::Bf16).unwrap();
        let y = graph.add_memory_tensor(layout, CudnnDataType::Bf16).unwrap();
        let factor = graph.add_scalar_tensor(2.0).unwrap();
        graph.add_pointwise(CudnnPointwiseMode::Multiply, &[x, factor], y).unwrap();
        assert!(graph.operation_graph(None).is_ok());
        // The pack stores the tensor addresses, and cuDNN does not read the memory at the
        // addresses.
        assert!(graph.variant_pack(&[(x, 0x1000), (y, 0x2000)], &[2.0], 0x3000).is_ok());
    }
}
